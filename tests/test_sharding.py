"""Splitting over devices: eight_devices*.py in a process that has them, caches over processes."""

import jax
import pytest
from cases import Case
from scripts import run_cases, run_script

from jax_fa import native, prefill_attention

EIGHT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def test_on_eight_devices():
    run_cases("eight_devices*.py", **EIGHT)


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_use_shardy_partitioner"),
    reason="this JAX has Shardy only; one with jax_use_shardy_partitioner runs this",
)
def test_on_eight_devices_with_gspmd():
    """XLA's older partitioner, which asks other questions."""
    which = "without_moving or moved_and or positions or divide or beyond_the or set_mesh or wanted"
    which += " or gradients_of_split"
    run_cases("eight_devices*.py", "-k", which, **EIGHT, JAX_USE_SHARDY_PARTITIONER="0")


def test_one_device_compiles_the_call_alone():
    """No callback into Python, which would keep programs out of caches and exports."""
    lowered = jax.jit(prefill_attention).lower(*Case("single", q_len=8).arrays())
    assert "CustomSPMDPartitioning" not in lowered.as_text()
    text = lowered.compile().as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    assert len([line for line in entry if " = " in line and "parameter(" not in line]) == 1
    assert native.PREFILL_TARGET in text


CACHED_CALL = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_fa
jax.config.update("jax_compilation_cache_dir", sys.argv[-1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
x = np.random.default_rng(0).standard_normal((8, 16, 2, 64))
q, kv, positions = x.astype(np.float32), x.astype(np.float16), np.full((8, 16), 15, np.int32)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    split = [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (q, kv, kv, positions)]
    for scale, grads in ((0.125, False), (0.25, False), (0.125, True), (0.25, True)):
        def of(attention):
            attend = lambda *a: attention(*a, scale=scale)
            return jax.grad(lambda *a: jnp.sum(jnp.sin(attend(*a)))) if grads else attend
        program = jax.jit(of(jax_fa.prefill_attention)).lower(*split)
        events.clear()
        compiled = program.compile()
        hits = "/jax/compilation_cache/cache_hits" in events
        want = of(jax_fa.reference.prefill_attention)(*map(jnp.asarray, (q, kv, kv, positions)))
        right = np.abs(np.asarray(compiled(*split)) - np.asarray(want)).max() < 1e-4
        name = "gradient" if grads else "call"
        print(kind.name, name, scale, "hit" if hits else "miss", "right" if right else "wrong")
"""


def test_split_programs_are_found_in_the_compilation_cache(tmp_path):
    """In another process, and those of another scale are not taken for the same."""
    script = f"import sys; sys.argv.append({str(tmp_path)!r})\n" + CACHED_CALL
    runs = [run_script(script, **EIGHT).split("\n")[:8] for _ in range(2)]
    whats = ("call 0.125", "call 0.25", "gradient 0.125", "gradient 0.25")
    kinds = [f"{kind} {what}" for kind in ("Auto", "Explicit") for what in whats]
    assert runs[0] == [f"{kind} miss right" for kind in kinds]
    assert runs[1] == [f"{kind} hit right" for kind in kinds]
