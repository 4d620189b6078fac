"""jax.export, ahead-of-time compilation, and the persistent compilation cache."""

import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits
from cases import Case
from jax import export
from scripts import run_script

import jax_fa


def attend(q, k, v, positions):
    return jax_fa.prefill_attention(q, k, v, positions, return_lse=True)


def symbolic_shapes(text):
    b, t, s = export.symbolic_shape("b, t, s")
    extents = {"b": b, "t": t, "s": s if text == "b, t, s" else 512}
    cache = jax.ShapeDtypeStruct((b, extents["s"], 2, 64), jnp.float16)
    q = jax.ShapeDtypeStruct((b, t, 4, 64), jnp.float32)
    return q, cache, cache, jax.ShapeDtypeStruct((b, t), jnp.int32)


@pytest.mark.parametrize("symbols", ["b, t", "b, t, s"])
def test_symbolic_extents_export_for_cpu_and_cuda_in_one(symbols):
    exported = export.export(
        jax.jit(attend), platforms=("cpu", "cuda"), disabled_checks=jax_fa.export_checks()
    )(*symbolic_shapes(symbols))
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "cuda")
    for batch, tokens in ((1, 1), (3, 70)):
        case = Case("export", batch=batch, q_len=tokens, kv_len=512, placement="anywhere")
        arrays = case.arrays()
        for a, b in zip(again.call(*arrays), attend(*arrays), strict=True):
            assert_same_bits(a, b)


def test_a_named_kernel_and_explain_take_symbolic_extents():
    answers = []

    def step(*arrays):
        answers.append(jax_fa.explain(*arrays))
        return jax_fa.prefill_attention(*arrays, implementation=jax_fa.available_kernels()[-1])

    export.export(jax.jit(step), disabled_checks=jax_fa.export_checks())(
        *symbolic_shapes("b, t, s")
    )
    assert answers[0].kernel in jax_fa.available_kernels()


def programs_of_version_1():
    """Plain and stacked; their calls have targets of their own and do not name their operands."""
    folder = pathlib.Path(__file__).parent / "data"
    return [
        export.deserialize(bytearray((folder / f"{name}_v1.jax_export").read_bytes()))
        for name in ("prefill_attention", "stacked_prefill_attention")
    ]


def test_a_program_that_version_1_exported_runs_with_the_same_bits():
    program, _ = programs_of_version_1()
    case = Case("plain_v1", batch=2, q_len=5, kv_len=19, q_heads=6, kv_heads=2, head_dim=16)
    arrays = replace(case, placement="anywhere").arrays()
    want = jax_fa.prefill_attention(*arrays, scale=0.3, return_lse=True)
    for got, wanted in zip(program.call(*arrays), want, strict=True):
        assert_same_bits(got, wanted)


def test_a_stacked_program_that_version_1_exported_runs_with_the_same_bits():
    _, program = programs_of_version_1()
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(aval.shape), aval.dtype) for aval in program.in_avals[:3]
    )
    positions = jnp.asarray(rng.integers(-2, 25, (2, 5)), jnp.int32)
    for layer in (-4, 0, 2, 9):
        got = program.call(q, k, v, positions, jnp.int32(layer))
        want = jax_fa.prefill_attention(q, k, v, positions, layer=jnp.int32(layer))
        assert_same_bits(got, want)


def test_the_helper_names_what_programs_of_both_versions_hold():
    names = {str(check) for check in jax_fa.export_checks()}
    for target in ("prefill_attention_v1", "stacked_prefill_attention_v1", "prefill_attention_v2"):
        assert any(f"jax_fa_{target}" in name for name in names), names


def test_symbolic_heads_are_refused_with_the_rule():
    h, d = export.symbolic_shape("h, d")
    for shape in ((1, 4, h, 64), (1, 4, 2, d)):
        array = jax.ShapeDtypeStruct(shape, jnp.float16)
        positions = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        with pytest.raises(ValueError, match="heads and head_dim must be numbers"):
            jax.eval_shape(attend, array, array, array, positions)


def test_without_the_helper_jax_names_the_custom_call():
    with pytest.raises(ValueError, match=jax_fa.native.PREFILL_TARGET):
        export.export(jax.jit(attend))(*symbolic_shapes("b, t"))


def test_an_artefact_runs_in_a_fresh_process(tmp_path):
    arrays = Case("fresh", q_len=5, n_past=4).arrays()
    exported = export.export(jax.jit(attend), disabled_checks=jax_fa.export_checks())(*arrays)
    (tmp_path / "artefact").write_bytes(exported.serialize(vjp_order=1))
    want = attend(*arrays)
    np.savez(tmp_path / "data.npz", *(np.asarray(x) for x in (*arrays, *want)))
    script = f"""
import pathlib, numpy as np, jax, jax_fa
folder = pathlib.Path({str(tmp_path)!r})
exported = jax.export.deserialize((folder / "artefact").read_bytes())
*arrays, want, want_lse = np.load(folder / "data.npz").values()
out, lse = exported.call(*arrays)
assert (np.asarray(out) == want).all() and (np.asarray(lse) == want_lse).all()
d_q = jax.grad(lambda q: exported.call(q, *arrays[1:])[0].sum())(arrays[0])
assert np.isfinite(np.asarray(d_q)).all() and np.abs(np.asarray(d_q)).max() > 0
print("ran")
"""
    assert "ran" in run_script(script)


def test_lowered_and_compiled_ahead_of_time():
    arrays = Case("aot", q_len=6, n_past=5).arrays()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    compiled = jax.jit(attend).lower(*shapes).compile()
    for a, b in zip(compiled(*arrays), attend(*arrays), strict=True):
        assert_same_bits(a, b)


def test_the_persistent_cache_hits_in_another_process(tmp_path):
    script = f"""
import logging, jax
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **kw: events.append(name))
import jax.numpy as jnp, jax_fa
q, k = jnp.ones((1, 3, 2, 64)), jnp.ones((1, 9, 1, 64), jnp.float16)
step = jax.jit(lambda *a: jax_fa.prefill_attention(*a))
events.clear()
step(q, k, k, jnp.asarray([[1, 2, 3]])).block_until_ready()
print("hits", sum(name.endswith("cache_hits") for name in events))
"""
    assert "hits 0" in run_script(script)
    assert "hits 0" not in run_script(script)
