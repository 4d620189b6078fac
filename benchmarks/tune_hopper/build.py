"""Compiles variants of the Hopper kernel, each to a shared library, and refuses bad code.

    python build.py OUTPUT_FOLDER [NAME ...]

Prints registers, spills and every ptxas warning of each; a spill or a serialised wgmma is an error.
"""

from __future__ import annotations

import concurrent.futures
import re
import subprocess
import sys
from pathlib import Path

from variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
NVCC = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", f"-I{ROOT}"]
HOST_SOURCES = [ROOT / "cuda/hopper/tensor_map.cc"]
JOBS = 2


def build(name: str, folder: Path) -> tuple[str, bool]:
    """Compiles one variant. Returns a line of report and whether the code is good."""
    source = folder / f"{name}.cu"
    library = folder / f"{name}.so"
    text = VARIANTS[name].source(name)
    source.write_text(text)
    command = [*NVCC, *VARIANTS[name].defines, "-Xptxas", "-v", "-shared", "-Xcompiler", "-fPIC"]
    done = subprocess.run(
        [*command, "-o", library, source, *HOST_SOURCES],
        capture_output=True,
        text=True,
        check=False,
    )
    log = done.stdout + done.stderr
    if done.returncode:
        return f"{name}: FAILED\n{log[:3000]}", False
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores", log)
    warnings = sorted(set(re.findall(r"\(?C7\d\d\d.*", log)))
    good = set(spills) <= {"0"} and not set(warnings) & {"C7510", "C7512", "C7513", "C7520"}
    return (
        f"{name}: registers {','.join(registers)} spills {','.join(spills)}"
        f" warnings {','.join(warnings) or 'none'}{'' if good else '  BAD'}",
        good,
    )


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    names = sys.argv[2:] or list(VARIANTS)
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        results = list(pool.map(lambda name: build(name, folder), names))
    for line, _ in results:
        print(line)
    return 0 if all(good for _, good in results) else 1


if __name__ == "__main__":
    sys.exit(main())
