"""Bad input: refused before launch, with names, values, the rule and the way out (C9)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits
from cases import Case

import jax_fa
from jax_fa import prefill_attention, reference

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16


def make(q=(2, 4, 4, 32), k=(2, 16, 2, 32), v=None, positions=None, dtypes=(F32, F16, F16)):
    v = k if v is None else v
    positions = q[:-2] if positions is None else positions
    return (
        jnp.zeros(q, dtypes[0]),
        jnp.zeros(k, dtypes[1]),
        jnp.zeros(v, dtypes[2]),
        jnp.zeros(positions, jnp.int32),
    )


# Name: arguments, error, words that the message must hold.
BAD_SHAPES = {
    "v_shorter_than_k": (make(v=(2, 15, 2, 32)), ["[2, 16, 2, 32]", "[2, 15, 2, 32]", "equal"]),
    "v_longer_than_k": (make(v=(2, 17, 2, 32)), ["[2, 16, 2, 32]", "[2, 17, 2, 32]", "equal"]),
    "v_other_heads": (make(v=(2, 16, 1, 32)), ["[2, 16, 2, 32]", "[2, 16, 1, 32]"]),
    "v_other_head_dim": (make(v=(2, 16, 2, 64)), ["[2, 16, 2, 32]", "[2, 16, 2, 64]"]),
    "v_unbatched": (make(v=(16, 2, 32)), ["[2, 16, 2, 32]", "[16, 2, 32]"]),
    "cache_other_batch": (make(k=(1, 16, 2, 32)), ["batch 2", "1", "vmap"]),
    "q_unbatched": (make(q=(4, 4, 32), positions=(4,)), ["[4, 4, 32]", "batch axis"]),
    "q_five_axes": (make(q=(1, 2, 4, 4, 32)), ["[1, 2, 4, 4, 32]", "[B, T, Hq, D]"]),
    "k_two_axes": (make(k=(16, 32)), ["[16, 32]", "[B, S, Hk, D]"]),
    "head_dim_differs": (make(k=(2, 16, 2, 48)), ["head_dim 48", "32", "equal"]),
    "positions_too_short": (make(positions=(2, 3)), ["[2, 3]", "[2, 4]", "one for each token"]),
    "positions_unbatched": (make(positions=(4,)), ["[4]", "[2, 4]"]),
    "positions_of_one": (make(positions=(2, 1)), ["[2, 1]", "[2, 4]"]),
    "heads_33_over_2": (make(q=(2, 4, 33, 32)), ["33 heads", "2", "multiple"]),
    "heads_3_over_2": (make(q=(2, 4, 3, 32)), ["3 heads", "2", "multiple"]),
    "heads_1_over_2": (make(q=(2, 4, 1, 32)), ["1 heads", "2", "multiple"]),
    "heads_0_over_2": (make(q=(2, 4, 0, 32)), ["0 heads", "2"]),
    "no_kv_heads": (make(k=(2, 16, 0, 32)), ["0 heads", "at least 1"]),
    "no_head_dim": (make(q=(2, 4, 4, 0), k=(2, 16, 2, 0)), ["head_dim 0", "at least 1"]),
}


@pytest.mark.parametrize("function", [prefill_attention, reference.prefill_attention])
@pytest.mark.parametrize("name", BAD_SHAPES)
def test_shapes_that_do_not_fit_raise_value_error(name, function):
    arguments, words = BAD_SHAPES[name]
    with pytest.raises(ValueError) as error:
        function(*arguments)
    for word in words:
        assert word in str(error.value)


BAD_DTYPES = {
    "float32_cache": (make(dtypes=(F32, F32, F32)), ["k has dtype float32", "astype"]),
    "float32_v": (make(dtypes=(F32, F16, F32)), ["v has dtype float32", "astype"]),
    "int8_cache": (make(dtypes=(F32, jnp.int8, jnp.int8)), ["k has dtype int8"]),
    "k_and_v_differ": (make(dtypes=(F32, F16, BF16)), ["k has dtype float16", "bfloat16", "equal"]),
    "q_bf16_cache_f16": (make(dtypes=(BF16, F16, F16)), ["bfloat16", "astype(jnp.float16)"]),
    "q_f16_cache_bf16": (make(dtypes=(F16, BF16, BF16)), ["float16", "astype(jnp.bfloat16)"]),
    "q_int32": (make(dtypes=(jnp.int32, F16, F16)), ["q has dtype int32", "float32"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DTYPES)
def test_dtypes_that_are_not_served_raise_type_error(name):
    arguments, words = BAD_DTYPES[name]
    with pytest.raises(TypeError) as error:
        prefill_attention(*arguments)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("value", [[[1.0]], (1,), None, "text", 3, {"a": 1}, object()])
def test_what_is_not_an_array_raises_type_error(which, value):
    arguments = list(make())
    arguments[which] = value
    with pytest.raises(TypeError, match=["q", "k", "v", "positions"][which]):
        prefill_attention(*arguments)


@pytest.mark.parametrize("which", range(4))
def test_shapes_without_data_raise_type_error_with_the_way_out(which):
    arguments = list(make())
    x = arguments[which]
    arguments[which] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    name = ["q", "k", "v", "positions"][which]
    with pytest.raises(TypeError, match=rf"^{name} is a jax.ShapeDtypeStruct.*jax\.eval_shape"):
        prefill_attention(*arguments)


def test_nested_lists_are_refused_by_name_wherever_arrays_are_taken():
    q, k, v, positions = make()
    new = k[:, :4]
    calls = {
        "positions": lambda x: prefill_attention(q, k, v, x),
        "k_cache": lambda x: jax_fa.update_kv_cache(x, v, new, new, positions),
        "k": lambda x: jax_fa.update_kv_cache(k, v, x, new, positions),
        "out_b": lambda x: jax_fa.merge_states(q, q[..., 0], x, q[..., 0]),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name} is a list; .*jnp\.asarray\({name}\)"):
            call([[0, 1]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bool_, jnp.bfloat16])
def test_positions_that_are_not_integers_raise_type_error(dtype):
    q, k, v, positions = make()
    with pytest.raises(TypeError, match="positions has dtype .* integer"):
        prefill_attention(q, k, v, positions.astype(dtype))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 1e300, 10**400])
def test_scale_that_is_not_finite_raises_value_error(scale):
    with pytest.raises(ValueError, match=r"scale is .* finite"):
        prefill_attention(*make(), scale=scale)


@pytest.mark.parametrize("scale", ["1", True, 1j, [1.0], np.ones(3)])
def test_scale_that_is_not_a_number_raises_type_error(scale):
    with pytest.raises(TypeError, match=r"scale is .* real number"):
        prefill_attention(*make(), scale=scale)


def test_traced_scale_raises_type_error_with_the_way_out():
    with pytest.raises(TypeError, match="multiply q"):
        jax.jit(lambda s: prefill_attention(*make(), scale=s))(0.5)


@pytest.mark.parametrize("flag", ["return_lse", "chunk_invariant"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_flags_that_are_not_bools_raise_type_error(flag, value):
    with pytest.raises(TypeError, match=f"{flag} is .* True or False"):
        prefill_attention(*make(), **{flag: value})


def test_arrays_that_jax_does_not_take_are_named_by_dtype():
    q, k, v, positions = make()
    with pytest.raises(TypeError, match=r"q is a ndarray of dtype >f4, which.* native byte order"):
        prefill_attention(np.zeros(q.shape, ">f4"), k, v, positions)
    with pytest.raises(TypeError, match=r"k is a ndarray of dtype object, which JAX does"):
        prefill_attention(q, np.zeros(k.shape, object), v, positions)


def test_unknown_implementation_names_the_built_ones():
    with pytest.raises(ValueError, match="'fastest' is not a kernel.*cpu"):
        prefill_attention(*make(), implementation="fastest")
    with pytest.raises(TypeError, match="None or one of"):
        prefill_attention(*make(), implementation=3)


def test_kernel_of_another_platform_is_refused():
    here = jax_fa.available_kernels()
    others = [name for _, name in jax_fa.dispatch.all_kernels() if name not in here]
    if not others:
        pytest.skip("this build has one platform's kernels only; a build with CUDA runs this")
    for name in others:
        with pytest.raises(ValueError, match=f"'{name}' (runs on|cannot serve)"):
            prefill_attention(*make(), implementation=name)


def test_handler_refuses_a_kernel_of_another_platform_by_itself():
    """As an exported program would meet it: the Python checks are not in the way."""
    other = "portable" if jax_fa.available_kernels() == ("cpu",) else "cpu"
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"implementation='{other}'"):
        call_directly(*make(), implementation=other)


DIRECT = {
    "v_shorter": (make(v=(2, 15, 2, 32)), "they must be equal"),
    "head_dim": (make(k=(2, 16, 2, 48)), "head_dim"),
    "heads": (make(q=(2, 4, 3, 32)), "multiple"),
    "positions": (make(positions=(2, 3)), "one position a token"),
    "batch": (make(k=(1, 16, 2, 32)), "batch axes"),
    "q_dtype": (make(dtypes=(jnp.int32, F16, F16)), "q has an unsupported dtype"),
    "cache_dtype": (make(dtypes=(F32, F32, F32)), "must be float16 or bfloat16"),
    "v_dtype": (make(dtypes=(F32, F16, BF16)), "k and v differ"),
    "mixed": (make(dtypes=(BF16, F16, F16)), "cache's dtype"),
}


def call_directly(q, *operands, results=1, target=jax_fa.native.PREFILL_TARGET, **attributes):
    """A direct ffi_call, as from a program that skipped jax_fa's Python."""
    out, lse = (jax.ShapeDtypeStruct(*of) for of in ((q.shape, q.dtype), (q.shape[:-1], F32)))
    call = jax.ffi.ffi_call(target, [out, lse, out][:results])
    return jax.block_until_ready(call(q, *operands, **attributes))


@pytest.mark.parametrize("name", DIRECT)
def test_handler_checks_again_what_python_has_checked(name):
    arguments, words = DIRECT[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        call_directly(*arguments)


LAYER = jnp.zeros((), jnp.int32)


@pytest.mark.parametrize(
    ("more", "attributes", "words"),
    [
        ([LAYER], {}, "has 5 operands; it must have q, k, v, positions and what operands='' names"),
        ([], {"operands": "layer"}, "has 4 operands; .* and what operands='layer' names"),
        ([LAYER], {"operands": "depth"}, "names 'depth', which this version does not know"),
        ([LAYER] * 2, {"operands": "layer layer"}, "names 'layer' twice"),
        ([], {"results": 3}, "has 3 results; they are out, and lse where it is wanted"),
        ([], {"slope": 1.0}, "attribute slope is unknown; this version knows operands"),
        ([], {"scale": 1.0}, "the attribute scale: .* expected F32 but got F64"),
        ([], {"operands": np.int32(1)}, "the attribute operands: Wrong attribute type"),
    ],
)
def test_handler_refuses_what_has_no_name_or_not_its_type(more, attributes, words):
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        call_directly(*make(), *more, **attributes)


@pytest.mark.parametrize("target", jax_fa.native.TARGETS[:2])
def test_handler_gives_absent_attributes_the_defaults_of_prefill_attention(target):
    want = prefill_attention(*make(), return_lse=True)
    for got in (call_directly(*make(), results=2, target=target), call_directly(*make())):
        for a, b in zip(got, want, strict=False):
            assert_same_bits(a, b)


def test_handler_refuses_a_scale_that_is_not_finite():
    with pytest.raises(jax.errors.JaxRuntimeError, match="scale is nan; it must be finite"):
        call_directly(*make(), scale=np.float32("nan"))


def test_import_guard_explains_a_version_clash():
    from jax_fa.native import check_ffi_version

    check_ffi_version((0, 3), (0, 3))
    check_ffi_version((0, 3), (0, 5))
    for built, runtime in (((0, 4), (0, 3)), ((1, 0), (0, 9)), ((0, 1), (1, 1))):
        with pytest.raises(ImportError, match=rf"XLA FFI {built[0]}\.{built[1]}.*Upgrade jaxlib"):
            check_ffi_version(built, runtime)


# Integers that int32 does not hold, where JAX would cut them down to it


def test_positions_beyond_int32_are_clamped_in_any_array(wide_array):
    q, k, v, _ = Case("wide", q_len=2, kv_len=9).arrays()
    far, padding = wide_array([[2**32, 2**63 - 1]]), wide_array([[-(2**63), -(2**32) + 1]])
    for function in (prefill_attention, reference.prefill_attention):
        want = function(q, k, v, jnp.full((1, 2), 8))
        np.testing.assert_array_equal(np.asarray(function(q, k, v, far)), np.asarray(want))
        assert (np.asarray(function(q, k, v, padding)) == 0).all()
    assert jax_fa.explain(q, k, v, far).kernel in jax_fa.available_kernels()


def test_64_bit_positions_reach_a_jitted_call_whole():
    q, k, v, _ = Case("wide", q_len=2, kv_len=9).arrays()
    with jax.enable_x64(True):
        far = jnp.asarray([[2**32, 2**63 - 1]], jnp.int64)
    want = prefill_attention(q, k, v, jnp.full((1, 2), 8))
    got = jax.jit(prefill_attention)(q, k, v, far)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(("index", "nearest"), [(2**32, 1), (-(2**32) + 1, 0)])
def test_a_layer_beyond_int32_is_clamped(index, nearest):
    q, k, v, positions = Case("wide", q_len=2, kv_len=9).arrays()
    k, v = jnp.stack([k, -k]), jnp.stack([v, 2 * v])
    with jax.enable_x64(True):
        layer = jnp.asarray(index, jnp.int64)
    want = prefill_attention(q, k, v, positions, layer=nearest)
    got = prefill_attention(q, k, v, positions, layer=layer)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_floats_of_64_bits_are_no_positions():
    q, k, v, _ = Case("wide", q_len=2, kv_len=9).arrays()
    with jax.enable_x64(True):
        floats = jnp.zeros((1, 2), jnp.float64)
    with pytest.raises(TypeError, match="positions has dtype float64"):
        prefill_attention(q, k, v, floats)
