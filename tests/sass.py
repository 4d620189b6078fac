"""Reads machine code that cuobjdump prints: what a kernel's main loops hold. No GPU needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);")
_TARGET = re.compile(r"\b0x([0-9a-f]+)")


@dataclass
class Function:
    """One kernel: its instructions as (address, opcode with suffixes, operands)."""

    name: str
    code: list[tuple[int, str, str]] = field(default_factory=list)

    def count(self, opcode: str) -> int:
        return sum(op.split(".")[0] == opcode for _, op, _ in self.code)

    def main_loop(self, **least: int) -> Counter:
        """Opcode counts of the shortest loop, by backward branch, with ``least`` of each opcode.

        Waits retry at the function's end and branch back from there, which looks like a loop over
        all between: ask for what only the real one holds.
        """
        bodies = []
        for address, op, operands in self.code:
            target = _TARGET.search(operands) if op.split(".")[0] == "BRA" else None
            if target and (start := int(target[1], 16)) < address:
                body = Counter(
                    op.split(".")[0] for at, op, _ in self.code if start <= at <= address
                )
                if all(body[opcode] >= count for opcode, count in least.items()):
                    bodies.append(body)
        return min(bodies, key=Counter.total, default=Counter())

    def highest_register(self, end: int) -> int:
        """Of the instructions below address ``end``; -1 if they use none."""
        used = (re.findall(r"\bR(\d+)\b", operands) for at, _, operands in self.code if at < end)
        return max((int(register) for found in used for register in found), default=-1)


def find_cuobjdump() -> str | None:
    """cuobjdump of a CUDA toolkit, or of the PyPI wheel beside this Python."""
    wheel = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "cuobjdump")
    return str(wheel) if wheel.exists() else shutil.which("cuobjdump")


def functions(library: str, architecture: str) -> list[Function]:
    """The kernels in ``library`` for ``architecture``, e.g. "sm_90a"."""
    cuobjdump = find_cuobjdump()
    assert cuobjdump, "cuobjdump is missing"
    text = subprocess.run(
        [cuobjdump, "-sass", "-arch", architecture, library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: list[Function] = []
    for line in text.splitlines():
        if "Function :" in line:
            found.append(Function(line.split("Function :")[1].strip()))
        elif found and (match := _INSTRUCTION.match(line)):
            found[-1].code.append((int(match[1], 16), match[2], match[3]))
    return found
