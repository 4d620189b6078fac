"""Fixtures and the rule for what a machine runs: every kernel that its default device can run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import is_meant_to_serve

import jax_fa

KERNELS = jax_fa.available_kernels()


def pytest_generate_tests(metafunc):
    if "kernel" in metafunc.fixturenames:
        metafunc.parametrize("kernel", KERNELS)


def pytest_report_header():
    native = jax_fa.native.load()
    return [
        f"jax_fa {jax_fa.__version__}, jax {jax.__version__}, on {jax.devices()[0].device_kind}",
        f"kernels under test: {', '.join(KERNELS)}; CUDA code: {native.cuda_architectures}; "
        f"CPU code: {native.cpu_isa()}",
    ]


class OfAnotherFramework:
    """What a tensor of another framework shows of itself to numpy."""

    def __init__(self, array):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def __array__(self, dtype=None, copy=None):
        return self.array


class AsJaxArray:
    """What knows its own way to be a jax array."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def _made_under_x64(values):
    with jax.enable_x64(True):
        return jnp.asarray(values, jnp.int64)


WIDE_ARRAYS = {
    "numpy": lambda values: np.asarray(values, np.int64),
    "x64": _made_under_x64,
    "array": lambda values: OfAnotherFramework(np.asarray(values, np.int64)),
    "jax_array": lambda values: AsJaxArray(_made_under_x64(values)),
    "buffer": lambda values: memoryview(np.asarray(values, np.int64)),
}


@pytest.fixture(params=WIDE_ARRAYS)
def wide_array(request):
    """A maker of 64-bit integer arrays, of each kind that may reach a call without x64."""
    return WIDE_ARRAYS[request.param]


@pytest.fixture
def attention(kernel):
    """prefill_attention by one kernel; a case that it is not meant to serve is skipped.

    A refusal of any other case fails, or a kernel that refused everything would pass.

    The output's memory is likely to hold NaN before the call: an array of its size, full of NaN, is
    freed just before. (The native tests and the harness poison it for certain.)
    """

    def call(q, k, v, positions, **options):
        asked = {name: x for name, x in options.items() if name != "return_lse"}
        answer = jax_fa.explain(q, k, v, positions, implementation=kernel, **asked)
        if not is_meant_to_serve(kernel, q.shape[-1], options.get("scale")):
            reason = answer.refusals[kernel]
            pytest.skip(f"{kernel} does not serve this call: {reason}; the other kernels run this")
        assert answer.kernel == kernel, answer
        if not isinstance(q, jax.core.Tracer):
            poison = jnp.full(q.shape, jnp.nan, q.dtype).block_until_ready()
            del poison
        return jax_fa.prefill_attention(q, k, v, positions, implementation=kernel, **options)

    return call
