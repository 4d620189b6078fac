"""How every benchmark here measures time, and what it says about the machine it ran on.

On a GPU a sample is the summed duration of the kernels that one call launches, taken from CUPTI
through jax's Mosaic profiler, so that host time and gaps between launches do not count. Where CUPTI
cannot be had, and on a CPU, a sample is wall clock. Contenders are always measured in interleaved,
shuffled rounds: a GPU's clock moves with its load, so only neighbours in time are comparable.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

Call = Callable[[], Any]
"""Starts one run on arrays it already holds; jax.block_until_ready can wait for what it returns."""

KERNEL_TIME = "CUPTI kernel time, median"
WALL_GPU = "wall clock per call of back-to-back calls, median"
WALL_CPU = "wall clock, best"


@dataclass(frozen=True)
class Timing:
    """Samples of one contender, in seconds per call."""

    samples: tuple[float, ...]
    method: str

    @property
    def seconds(self) -> float:
        """The figure to report: the best on a CPU, where noise only adds, otherwise the median."""
        if self.method.startswith(WALL_CPU):
            return min(self.samples)
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile, in seconds."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    def as_json(self) -> dict[str, Any]:
        """The figures that a report keeps, in microseconds."""
        first, third = self.quartiles
        return {
            "us": self.seconds * 1e6,
            "min_us": min(self.samples) * 1e6,
            "q1_us": first * 1e6,
            "q3_us": third * 1e6,
            "samples": len(self.samples),
            "method": self.method,
        }


def measure(
    calls: Mapping[str, Call],
    *,
    rounds: int = 5,
    per_round: int = 4,
    seed: int = 0,
    wall: bool = False,
) -> dict[str, Timing]:
    """Times `calls` against each other.

    Args:
      calls: contenders by name, each already run once (compiled, and known to work).
      rounds: how often the whole field is gone through, in a new random order each time.
      per_round: back-to-back runs of a contender in its turn.
      seed: of the orders.
      wall: whether host time and gaps between launches count on a GPU too.

    Returns:
      rounds * per_round samples of each contender; `rounds` of them where it is wall clock.
    """
    rng = random.Random(seed)
    turns: list[str] = []
    for _ in range(rounds):
        order = list(calls)
        rng.shuffle(order)
        turns += order
    if jax.default_backend() != "gpu":
        return _measure_wall(calls, turns, per_round=1, method=WALL_CPU)
    if wall:
        return _measure_wall(calls, turns, per_round, method=WALL_GPU)
    try:
        return _measure_kernels(calls, turns, per_round)
    except CuptiUnavailableError as error:
        return _measure_wall(calls, turns, per_round, method=f"{WALL_GPU} ({error})")


def _measure_wall(
    calls: Mapping[str, Call], turns: Sequence[str], per_round: int, method: str
) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns:
        start = time.perf_counter()
        jax.block_until_ready([calls[name]() for _ in range(per_round)])
        samples[name].append((time.perf_counter() - start) / per_round)
    return {name: Timing(tuple(values), method) for name, values in samples.items()}


def _measure_kernels(
    calls: Mapping[str, Call], turns: Sequence[str], per_round: int
) -> dict[str, Timing]:
    runs = [name for name in turns for _ in range(per_round)]
    marker = _Marker()

    def marked_turns() -> None:
        for name in turns:
            results = []
            for _ in range(per_round):
                marker()
                results.append(calls[name]())
            jax.block_until_ready(results)

    seconds = _split_at_marker(kernels_launched_by(marked_turns), marker.kernel)
    if len(seconds) != len(runs):
        # A contender launches a kernel of the marker's name: give each run a session of its own,
        # which costs about 0.1 s apiece.
        seconds = [
            sum(duration for _, duration in kernels_launched_by(calls[name])) for name in runs
        ]
    silent = sorted({name for name, value in zip(runs, seconds, strict=True) if value <= 0})
    if silent:
        raise CuptiUnavailableError(f"CUPTI saw no kernel of {', '.join(silent)}")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, value in zip(runs, seconds, strict=True):
        samples[name].append(value)
    return {name: Timing(tuple(values), KERNEL_TIME) for name, values in samples.items()}


class CuptiUnavailableError(RuntimeError):
    """Kernel times cannot be had; the text says why."""


Kernel = tuple[str, float]
"""Name and duration in seconds."""


class _Marker:
    """A one-kernel call put before each run, so that one session's records can be told apart."""

    def __init__(self) -> None:
        self._operand = jnp.full((8,), 0.5, jnp.float32)
        self._call = jax.jit(jnp.arctanh)
        jax.block_until_ready(self())
        kernels = kernels_launched_by(self)
        if len(kernels) != 1:
            raise CuptiUnavailableError(
                f"CUPTI saw {len(kernels)} kernels of a call that launches one"
            )
        self.kernel = kernels[0][0]

    def __call__(self) -> Any:
        return self._call(self._operand)


def _split_at_marker(kernels: Sequence[Kernel], marker: str) -> list[float]:
    """Summed durations of the stretches that follow each kernel called `marker`."""
    totals: list[float] = []
    for name, duration in kernels:
        if name == marker:
            totals.append(0.0)
        elif totals:
            totals[-1] += duration
    return totals


def kernels_launched_by(call: Call) -> list[Kernel]:
    """Runs `call` in a CUPTI session and returns the kernels it launched, in launch order; those of
    all GPUs, without saying of which."""
    extension = _cupti_extension()
    jax.block_until_ready(jnp.zeros(()))
    try:
        extension._cupti_init()
    except RuntimeError as error:
        raise CuptiUnavailableError(str(error)) from error
    try:
        jax.block_until_ready(call())
    finally:
        records = extension._cupti_get_timings(True)
    return [(str(name), milliseconds * 1e-3) for name, milliseconds in records]


def _cupti_extension() -> Any:
    """The native module behind jax.experimental.mosaic.gpu.profiler. That profiler times one call
    at a time; its session is used directly so that a single one can hold all rounds."""
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError as error:
        raise CuptiUnavailableError(f"this jaxlib has no Mosaic GPU profiler: {error}") from error
    extension = getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
    if extension is None or not hasattr(extension, "_cupti_init"):
        raise CuptiUnavailableError("this jaxlib has no Mosaic GPU profiler")
    return extension


def machine(*packages: str) -> dict[str, Any]:
    """What a number needs beside it: date, hardware, versions, command line."""
    device, on_gpu = jax.devices()[0], jax.default_backend() == "gpu"
    script = os.path.relpath(sys.argv[0], Path(__file__).parent.parent)
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device.device_kind if on_gpu else _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
        "command": shlex.join(["python", script, *sys.argv[1:]]),
    }
    if on_gpu:
        facts["driver"] = _nvidia_driver()
    for package in ("jax", "jaxlib", "jax-fa", *packages):
        facts[package] = _version(package)
    return {name: value for name, value in facts.items() if value is not None}


def print_machine(facts: Mapping[str, Any]) -> None:
    """Prints what `machine` found, as two comment lines above the numbers."""
    command = facts["command"]
    others = (f"{key} {value}" for key, value in facts.items() if key not in ("command", "device"))
    print(f"# {facts['device']}; {', '.join(others)}\n# {command}", flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table; the first row is its head, the first column is flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for row in itertools.chain(rows[:1], [rule], rows[1:]):
        cells = [row[0].ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else (platform.processor() or platform.machine())


def _nvidia_driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else None
