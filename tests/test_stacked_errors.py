"""What is refused of stacked caches and layers, in Python and by the handler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from test_errors import call_directly
from test_stacked import stacked

import jax_fa
from jax_fa import prefill_attention, reference, update_kv_cache


def refused(operands, layer, words):
    q, ks, vs, positions = operands
    for function in (prefill_attention, reference.prefill_attention, jax_fa.explain):
        with pytest.raises((TypeError, ValueError), match=words):
            function(q, ks, vs, positions, layer=layer)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (3, r"layer is 3, and 3 layers are stacked; it must be 0 \.\. 2"),
        (-1, "layer is -1"),
        (np.int64(2**40), "layer is 1099511627776"),
        (10**30, "layer is 1000000000000000000000000000000, and 3"),
        (True, "layer is True; it must be an integer"),
        (1.0, r"layer is 1\.0; it must be an integer"),
        ("1", "layer is '1'"),
        (jnp.float32(1), "layer has dtype float32"),
        (np.zeros(1, np.int32), r"layer has shape \[1\]; it must be one number"),
        (jnp.zeros((2, 1), jnp.int32), r"layer has shape \[2, 1\]"),
    ],
    ids=str,
)
def test_layers_that_are_none_are_refused(layer, words):
    refused(stacked(Case("refused", q_len=2, n_past=3), 0), layer, words)
    _, ks, vs, positions = stacked(Case("refused", q_len=2, n_past=3), 0)
    rows = jnp.ones((1, 2, 2, 64))
    with pytest.raises((TypeError, ValueError), match=words):
        update_kv_cache(ks, vs, rows, rows, positions, layer=layer)


def test_stacks_that_do_not_fit_are_refused():
    q, ks, vs, positions = operands = stacked(Case("unfit", batch=2, q_len=2, n_past=3), 0)
    with pytest.raises(ValueError, match=r"\[B, S, Hk, D\].*stacked over layers needs layer="):
        prefill_attention(*operands)
    refused((q, ks[0, 0], vs[0, 0], positions), 0, r"must be \[L, B, S, Hk, D\]")
    refused((q, ks[0], vs[0], positions), 0, "or none has, and with layer= k has an axis of layers")
    refused((q, ks[:, :1], vs[:, :1], positions), 0, "q has batch 2, k has 1")
    refused((q, ks[:0], vs[:0], positions), jnp.int32(0), "no layer; there must be at least 1")
    rows = jnp.ones((2, 2, 2, 64))
    with pytest.raises(ValueError, match="k_cache has shape .* needs layer="):
        update_kv_cache(ks, vs, rows, rows, positions)
    with pytest.raises(ValueError, match="less its layers, they may differ only"):
        update_kv_cache(ks, vs, rows[:1], rows[:1], positions[:1], layer=0)


DIRECT = {  # k and v, layer, words
    "five_axes": ((3, 2, 9, 2, 8), jnp.int32(0), r"must be \[stacks, layers, batch, S, Hk, D\]"),
    "no_layers": ((1, 0, 2, 9, 2, 8), jnp.int32(0), "at least one layer"),
    "batch": ((1, 3, 3, 9, 2, 8), jnp.int32(0), "1 stacks of 3 sequences"),
    "two_layers": ((1, 3, 2, 9, 2, 8), jnp.zeros(2, jnp.int32), r"layer has shape \[2\]"),
    "layer_dtype": ((1, 3, 2, 9, 2, 8), jnp.float32(0), "layer must be int32"),
}


@pytest.mark.parametrize("name", DIRECT)
def test_handler_checks_again_what_python_has_checked(name):
    shape, layer, words = DIRECT[name]
    q, positions, cache = jnp.ones((2, 4, 4, 8)), jnp.zeros((2, 4), jnp.int32), jnp.ones(shape)
    cache = cache.astype(jnp.float16)
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        call_directly(q, cache, cache, positions, layer, operands="layer")
