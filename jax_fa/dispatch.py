"""Which kernel serves a call: the question, asked of the compiled table, and its answer in words.

The choice itself is made by the handler at run time, on the device that the call lands on, from the
same table; see cuda/kernels.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jax_fa import checks, native

# JAX's names of platforms, to ours.
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}


@dataclass(frozen=True)
class Explanation:
    """Which kernel serves a call, and why the others do not.

    Attributes:
      kernel: Name of the kernel that serves the call, or None if none does.
      device: The device asked about, in words.
      refusals: Kernel name to reason, for each kernel that cannot serve the call there.
      passed_over: Names of the kernels that could serve it too, in order of preference.
      not_built: What this build lacks, in words, and how to get it; empty where it lacks nothing.
    """

    kernel: str | None
    device: str
    refusals: Mapping[str, str] = field(hash=False)
    passed_over: tuple[str, ...]
    not_built: str = ""

    def __str__(self) -> str:
        served = f"served by {self.kernel}" if self.kernel else "served by no kernel"
        lines = [f"{served} on {self.device}"]
        lines += [f"  {name}: could serve it too" for name in self.passed_over]
        lines += [f"  {name}: no; {reason}" for name, reason in self.refusals.items()]
        lines += [f"  {self.not_built}"] if self.not_built else []
        return "\n".join(lines)


def all_kernels() -> list[tuple[str, str]]:
    """Each kernel of this build as (platform, name), the preferred ones first."""
    table = native.load()
    return [
        (platform, name) for platform in ("cuda", "cpu") for name in table.kernel_names(platform)
    ]


def _not_built() -> str:
    if native.load().cuda_architectures:
        return ""
    return "this build has no CUDA kernels (reinstall with JAX_FA_CUDA=wheels to get them)"


def check_implementation(implementation: Any) -> str:
    """The name of the kernel asked for, or "" for the best one; refuses what is not built."""
    if implementation is None:
        return ""
    names = [name for _, name in all_kernels()]
    if not isinstance(implementation, str):
        raise TypeError(
            f"implementation is {implementation!r}; it must be None or one of {', '.join(names)}."
        )
    if implementation not in names:
        without_cuda = f"; {_not_built()}" if _not_built() else ""
        raise ValueError(
            f"implementation={implementation!r} is not a kernel of this build (built: "
            f"{', '.join(names)}){without_cuda}. implementation=None picks the best one."
        )
    return implementation


def _capability(device: jax.Device) -> int:
    """Compute capability of a CUDA device as one number (9.0 is 90); 0 for any other."""
    major, _, minor = str(getattr(device, "compute_capability", "0.0")).partition(".")
    return int(major) * 10 + int(minor or 0)


def _problem(call: checks.Call) -> Any:
    table = native.load()
    problem = table.AttentionProblem()
    # A symbolic extent stands for any; no kernel's choice depends on how long these are.
    q, k = call.operands.q, call.operands.k
    extents = [extent if isinstance(extent, int) else 1 for extent in q.shape]
    problem.batch, problem.q_len, problem.q_heads, problem.head_dim = extents
    problem.kv_len = k.shape[-3] if isinstance(k.shape[-3], int) else 1
    problem.kv_heads = k.shape[-2]
    if call.operands.layer is not None and isinstance(k.shape[0], int):
        problem.layers = k.shape[0]
    problem.q_dtype = getattr(table.DType, str(q.dtype))
    problem.kv_dtype = getattr(table.DType, str(k.dtype))
    problem.has_starts = call.operands.starts is not None
    problem.has_sinks = call.operands.sinks is not None
    for name, value in vars(call.options).items():
        if value is not None:
            setattr(problem, name, value)
    return problem


def _devices_of(operands: tuple[Any, ...]) -> list[jax.Device]:
    """The devices that a call with these operands would run on; none if that is not settled yet."""
    arrays = [
        x for x in operands if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    ]
    for array in sorted(arrays, key=lambda array: not array.committed):
        return sorted(array.devices(), key=lambda device: device.id)
    return []


def _check_device(device: Any) -> jax.Device:
    if device is None:
        return default_device()
    if not isinstance(device, jax.Device):
        raise TypeError(f"device is {device!r}; pass a jax.Device, such as jax.devices('cpu')[0].")
    return device


def default_device() -> jax.Device:
    """The device that JAX places uncommitted arrays on."""
    chosen = getattr(jax.config, "jax_default_device", None)
    if chosen is None:
        return jax.devices()[0]
    return jax.devices(chosen)[0] if isinstance(chosen, str) else chosen


def refusals_on(call: checks.Call, device: jax.Device) -> dict[str, str]:
    """For each kernel of this build, why it cannot serve ``call`` on ``device``; "" if it can."""
    platform = _PLATFORMS.get(device.platform, device.platform)
    problem, capability, table = _problem(call), _capability(device), native.load()
    reasons = {}
    for kernel_platform, name in all_kernels():
        if kernel_platform == platform:
            reasons[name] = table.refusal(name, problem, capability)
        else:
            reasons[name] = f"it runs on {kernel_platform}, and the device is {platform}"
    return reasons


def check_can_serve(call: checks.Call, wanted: str, operands: tuple[Any, ...]) -> None:
    """Refuses a kernel that no device of its platform here could serve the call with.

    Which device a traced call lands on is not known yet, so one that can is enough; the handler
    asks again on the device itself.
    """
    platform = next(platform for platform, name in all_kernels() if name == wanted)
    devices = _devices_of(operands)
    if not devices:
        try:
            devices = jax.devices(platform)
        except RuntimeError:
            raise ValueError(
                f"implementation={wanted!r} runs on {platform}, and JAX sees no such device; "
                "use implementation=None."
            ) from None
    reasons = [refusals_on(call, device) for device in devices]
    if all(reason[wanted] for reason in reasons):
        others = [name for name, refusal in reasons[0].items() if not refusal]
        instead = f"implementation=None would use {others[0]}" if others else "no kernel serves it"
        raise ValueError(
            f"implementation={wanted!r} cannot serve this call: {reasons[0][wanted]}; {instead}."
        )


def _check_shapes(**arguments: Any) -> checks.Call:
    """checks.check_call, which also takes operands that are shapes without data."""
    shapes = {n: x for n, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
    if not shapes:
        return checks.check_call(**arguments)
    calls: list[checks.Call] = []

    def check(traced: dict[str, Any]) -> None:
        call = checks.check_call(**arguments | traced)
        # Tracers may not outlive the trace.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call.operands)
        calls.append(replace(call, operands=shapes))

    jax.eval_shape(check, shapes)
    return calls[0]


def explain(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    *,
    layer: Any = None,
    starts: Any = None,
    sinks: Any = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    chunk_invariant: bool = True,
    implementation: str | None = None,
    device: jax.Device | None = None,
) -> Explanation:
    """Says which kernel serves ``prefill_attention`` with these arguments, and why others do not.

    Nothing is computed or compiled; inside ``jit`` it looks at the traced shapes.

    Args:
      q: As for :func:`jax_fa.prefill_attention`, and so are the others and the options; arrays
        may also be ``jax.ShapeDtypeStruct``.
      k: See q.
      v: See q.
      positions: See q.
      layer: See q; any layer of the stack.
      starts: See q.
      sinks: See q.
      scale: See q.
      sliding_window: See q.
      logits_soft_cap: See q.
      return_lse: See q; every kernel can return it.
      chunk_invariant: See q.
      implementation: See q. With a name, the answer is that kernel or None.
      device: The device to ask about; by default the one that the arrays are on, or JAX's default
        device where they are traced, numpy arrays or shapes.

    Returns:
      An :class:`Explanation`; ``print`` it for the answer in words.

    Raises:
      TypeError, ValueError: What ``prefill_attention`` would raise for the same arguments.
    """
    checks.as_flag("return_lse", return_lse)
    call = _check_shapes(
        q=q,
        k=k,
        v=v,
        positions=positions,
        layer=layer,
        starts=starts,
        sinks=sinks,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        chunk_invariant=chunk_invariant,
    )
    wanted = check_implementation(implementation)
    if device is None:
        device = next(iter(_devices_of((q, k, v, positions, layer, starts, sinks))), None)
    device = _check_device(device)
    reasons = refusals_on(call, device)
    able = [name for name, reason in reasons.items() if not reason]
    serving = [wanted] if wanted in able else ([] if wanted else able)
    return Explanation(
        kernel=serving[0] if serving else None,
        device=f"{device.device_kind} ({device})",
        refusals={name: reason for name, reason in reasons.items() if reason},
        passed_over=tuple(name for name in able if name not in serving[:1]),
        not_built=_not_built(),
    )


def available_kernels(device: jax.Device | None = None) -> tuple[str, ...]:
    """Names of the kernels of this build that run on ``device`` (default: JAX's default device).

    The preferred one comes first. Whether one serves a given call is for :func:`explain` to say.
    """
    platform_name = _check_device(device).platform
    platform = _PLATFORMS.get(platform_name, platform_name)
    return tuple(name for kernel_platform, name in all_kernels() if kernel_platform == platform)
