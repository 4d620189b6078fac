"""Two devices in one process: who is met first, threads, calls in flight on both, an error on one.

Run by test_two_gpus.py in a process of its own; by hand, with two GPUs or with JAX_PLATFORMS=cpu
and XLA_FLAGS=--xla_force_host_platform_device_count=2.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from threading import Barrier

import jax
import numpy as np
import pytest
from bounds import assert_same_bits
from cases import Case
from jax.sharding import PartitionSpec as P
from split import mesh, put
from unserved import REFUSAL, attend_unserved

from jax_fa import explain, prefill_attention

DEVICES = jax.devices()[:2]
CASES = [
    Case("two_devices_64", batch=2, q_len=20, n_past=44, placement="anywhere"),
    Case("two_devices_128", q_len=70, n_past=70, q_heads=8, head_dim=128, kv_dtype="bfloat16"),
    Case("two_devices_256", q_len=33, head_dim=256, q_dtype="float16"),
]


def served(kernel, cases):
    """The arrays, on the host, of those cases that the kernel serves."""
    arrays = [jax.device_get(case.arrays()) for case in cases]
    return [x for x in arrays if explain(*x, implementation=kernel).kernel]


def attend_on(device, arrays, kernel, **options):
    out = prefill_attention(*jax.device_put(arrays, device), implementation=kernel, **options)
    assert out.devices() == {device}
    return np.asarray(out)


def builds(kernel):
    """Calls that between them take every build of the kernel: arrays on the host, and options."""
    sizes = [(48, 0, 4, {}, (64, 128, 256))]
    if kernel == "hopper":  # it has builds for many query tiles, and for long calls that may vary
        sizes += [(320, 0, 64, {}, (64, 128, 256))]
        sizes += [(8192, 8192, 1, {"chunk_invariant": False}, (128,))]
    dtypes = [("float32", "float16"), ("float32", "bfloat16"), ("float16",) * 2, ("bfloat16",) * 2]
    for (q_len, spare, heads, options, head_dims), (q_dtype, kv_dtype) in product(sizes, dtypes):
        cases = [
            Case(
                f"build_{q_len}_{head_dim}",
                q_len=q_len,
                spare=spare,
                q_heads=heads,
                kv_heads=1,
                head_dim=head_dim,
                q_dtype=q_dtype,
                kv_dtype=kv_dtype,
            )
            for head_dim in head_dims
        ]
        for arrays in served(kernel, cases):
            yield arrays, options


def test_first_calls_go_to_either_device(kernel):
    """What a launch needs once a device is not taken for done once a process.

    The first call of all goes to the second device; then, of each build, every other one's does.
    It stands first in this file: no other call may have been made before.
    """
    calls = list(builds(kernel))
    for i, (arrays, options) in enumerate(calls):
        order = DEVICES[::-1] if i % 2 == 0 else DEVICES
        assert_same_bits(*(attend_on(device, arrays, kernel, **options) for device in order))
    assert len(calls) >= 8


def test_threads_that_are_pinned_to_a_device_get_its_bits(kernel):
    calls = served(kernel, CASES)
    alone = {device: [attend_on(device, x, kernel) for x in calls] for device in DEVICES}
    for a, b in zip(*alone.values(), strict=True):
        assert_same_bits(a, b)
    start = Barrier(2 * len(DEVICES))

    def by_committed_arrays(device):
        start.wait(60)
        return [attend_on(device, x, kernel) for _ in range(8) for x in calls]

    def by_default_device(device):
        start.wait(60)
        outs = []
        with jax.default_device(device):
            for x in calls * 8:
                out = prefill_attention(*x, implementation=kernel)
                assert out.devices() == {device}
                outs.append(np.asarray(out))
        return outs

    with ThreadPoolExecutor(2 * len(DEVICES)) as pool:
        running = [
            (device, pool.submit(work, device))
            for device in DEVICES
            for work in (by_committed_arrays, by_default_device)
        ]
        for device, future in running:
            for got, want in zip(future.result(120), alone[device] * 8, strict=True):
                assert_same_bits(got, want)


def test_calls_in_flight_on_both_devices_keep_apart(kernel):
    """Twenty deep on each, every call on the one before it."""
    (arrays,) = served(kernel, [Case("flight", q_len=64, n_past=64, head_dim=64)])
    attend = jax.jit(lambda *x: prefill_attention(*x, implementation=kernel))
    placed = [jax.device_put(arrays, device) for device in DEVICES]
    want = placed[0][0]
    for _ in range(20):
        want = attend(want, *placed[0][1:]).block_until_ready()
    outs = [q for q, *_ in placed]
    for _ in range(20):
        outs = [attend(out, *rest) for out, (_, *rest) in zip(outs, placed, strict=True)]
    for out, device in zip(outs, DEVICES, strict=True):
        assert out.devices() == {device}
        assert_same_bits(out, want)


def test_an_error_on_one_device_leaves_both_usable(kernel):
    arrays = served(kernel, CASES)[0]
    want = attend_on(DEVICES[0], arrays, kernel)
    for device in DEVICES:
        with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
            jax.block_until_ready(attend_unserved(*jax.device_put(arrays, device)))
        for again in DEVICES:
            assert_same_bits(attend_on(again, arrays, kernel), want)


def test_an_error_of_a_split_call_leaves_both_usable(kernel):
    arrays = served(kernel, CASES)[0]
    split = put(arrays, mesh(x=2), [P("x")] * 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
        jax.block_until_ready(jax.jit(attend_unserved)(*split))
    got = jax.jit(lambda *x: prefill_attention(*x, implementation=kernel))(*split)
    assert_same_bits(got, attend_on(DEVICES[0], arrays, kernel))
    assert not got.sharding.is_fully_replicated
