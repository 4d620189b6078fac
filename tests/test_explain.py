"""explain: which kernel serves a call, and why the others do not."""

import jax
import jax.numpy as jnp
import pytest
from cases import Case
from scripts import run_script
from serving import is_meant_to_serve

import jax_fa
from jax_fa import explain


def test_the_served_kernel_is_the_preferred_one_and_named():
    arrays = Case("explain", q_len=4).arrays()
    answer = explain(*arrays)
    assert answer.kernel in jax_fa.available_kernels()
    assert str(answer).startswith(f"served by {answer.kernel} on ")


def test_every_kernel_is_accounted_for():
    answer = explain(*Case("explain", q_len=4).arrays())
    named = {answer.kernel, *answer.passed_over, *answer.refusals}
    assert named == {name for _, name in jax_fa.dispatch.all_kernels()}
    assert all(reason and reason in str(answer) for reason in answer.refusals.values())


def test_a_build_without_cuda_kernels_says_so():
    answer = explain(*Case("not_built", q_len=3).arrays())
    lacks = not jax_fa.native.load().cuda_architectures
    assert ("JAX_FA_CUDA=wheels" in answer.not_built) == lacks
    assert ("JAX_FA_CUDA=wheels" in str(answer)) == lacks


def test_a_forced_kernel_is_the_answer_or_none(kernel):
    served = Case("explain", q_len=4, head_dim=64).arrays()
    assert explain(*served, implementation=kernel).kernel == kernel


def test_explain_works_on_traced_values():
    answers = []

    @jax.jit
    def step(*arrays):
        answers.append(explain(*arrays))
        return arrays[0]

    step(*Case("explain", q_len=4).arrays())
    assert answers[0].kernel in jax_fa.available_kernels()


def test_explain_raises_what_the_call_would_raise():
    q, k, v, positions = Case("explain", q_len=4).arrays()
    with pytest.raises(ValueError, match="head_dim"):
        explain(q[..., :5], k, v, positions)
    with pytest.raises(TypeError, match="cache"):
        explain(q, k.astype(jnp.float32), v, positions)
    with pytest.raises(ValueError, match="not a kernel"):
        explain(q, k, v, positions, implementation="nothing")
    with pytest.raises(TypeError, match="return_lse"):
        explain(q, k, v, positions, return_lse=1)


def test_the_cuda_table_answers_by_capability_without_a_gpu():
    """The compiled table, asked directly: it reads no device."""
    native = jax_fa.native.load()
    if native.cuda_architectures is None:
        pytest.skip("this build has no CUDA kernels; a build with JAX_FA_CUDA=wheels runs this")
    problem = jax_fa.dispatch._problem(
        jax_fa.checks.check_call(*Case("table", head_dim=96, q_len=4).arrays())
    )
    assert native.refusal("naive", problem, 90) == ""
    assert "head_dim 96" in native.refusal("portable", problem, 90)
    problem.head_dim = 128
    assert native.refusal("portable", problem, 90) == ""
    assert native.refusal("naive", problem, 70) != "", "no code is built for sm_70"
    problem.q_dtype = problem.kv_dtype = native.DType.bfloat16
    assert native.refusal("portable", problem, 75) != "", "wmma has no bfloat16 on sm_75"


@pytest.mark.parametrize("name", ["naive", "portable", "hopper"])
def test_the_cuda_table_refuses_what_it_is_not_meant_to_serve_and_nothing_else(name):
    native = jax_fa.native.load()
    if "90a" not in (native.cuda_architectures or ""):
        pytest.skip("this build has no code for Hopper; a build with CUDA and 90a-real runs this")
    problem = jax_fa.dispatch._problem(
        jax_fa.checks.check_call(*Case("table", head_dim=8, q_len=4).arrays())
    )
    for head_dim in range(1, 300):
        for scale in (0.1, 7.0, 0.0, -0.1):
            problem.head_dim, problem.scale = head_dim, scale
            refusal = native.refusal(name, problem, 90)
            assert (refusal == "") == is_meant_to_serve(name, head_dim, scale), (
                f"head_dim {head_dim}, scale {scale}: {refusal!r}"
            )


def test_import_and_explain_work_with_no_gpu_visible():
    script = """
import jax.numpy as jnp, jax_fa
q, k = jnp.ones((1, 2, 2, 64)), jnp.ones((1, 9, 1, 64), jnp.float16)
p = jnp.asarray([[3, 8]])
answer = jax_fa.explain(q, k, k, p)
assert answer.kernel == "cpu", answer
assert jax_fa.available_kernels() == ("cpu",)
assert all("runs on cuda" in reason for reason in answer.refusals.values()), answer
assert (jax_fa.prefill_attention(q, k, k, p) == 1).all()
print("ok")
"""
    assert "ok" in run_script(script, JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")


def test_shapes_without_data_are_explained_too():
    arrays = Case("explain", q_len=4).arrays()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with jax.checking_leaks():
        assert explain(*shapes) == explain(*arrays)
    with pytest.raises(ValueError, match="head_dim"):
        explain(jax.ShapeDtypeStruct((1, 4, 4, 5), jnp.float32), *shapes[1:])


def test_the_device_must_be_one():
    arrays = Case("explain", q_len=4).arrays()
    with pytest.raises(TypeError, match=r"device is 'cpu'; pass a jax\.Device"):
        explain(*arrays, device="cpu")
    with pytest.raises(TypeError, match=r"device is 3"):
        jax_fa.available_kernels(3)
