"""The reference, compiled for the CPU: quick, and independent of the device under test."""

from __future__ import annotations

from functools import partial

import jax

from jax_fa import reference

_compiled = partial(jax.jit, static_argnames=("scale", "return_lse"))(reference.prefill_attention)


def attend(q, k, v, positions, *, scale=None, return_lse=False):
    """``reference.prefill_attention`` of these arrays, computed on the CPU."""
    arrays = jax.device_put((q, k, v, positions), jax.devices("cpu")[0])
    return _compiled(*arrays, scale=scale, return_lse=return_lse)
