"""Processes started from one that has imported jax_fa: spawned ones, and forked ones.

docs/contract.md says what holds. A process that hangs fails its test by a time limit.
"""

import multiprocessing
import sys

import jax
import numpy as np
import pytest
from bounds import assert_same_bits
from cases import Case
from scripts import run_script

import jax_fa

SECONDS = 120

# Children share the device with this process.
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

CASE = Case("processes", batch=2, q_len=20, n_past=30, placement="anywhere")

forks = pytest.mark.skipif(
    sys.platform != "linux", reason="forks, and reads /proc; Linux runs this"
)


def attend_by_every_kernel(arrays):
    return [
        np.asarray(jax_fa.prefill_attention(*arrays, implementation=kernel))
        for kernel in jax_fa.available_kernels()
    ]


def test_a_spawned_process_gets_the_same_bits(monkeypatch):
    for name, value in SHARED.items():
        monkeypatch.setenv(name, value)
    arrays = jax.device_get(CASE.arrays())
    # Left by terminating what still runs.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply_async(attend_by_every_kernel, (arrays,)).get(SECONDS)
    for got, want in zip(there, attend_by_every_kernel(arrays), strict=True):
        assert_same_bits(got, want)


START = """
import hashlib, multiprocessing, os, warnings
import jax, jax.numpy as jnp, numpy as np
threads = len(os.listdir("/proc/self/task"))
import jax_fa
assert len(os.listdir("/proc/self/task")) == threads, "the import started threads"

def attend():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 40, 4, 64), np.float32)
    k, v = (rng.standard_normal((1, 70, 2, 64), np.float32).astype(np.float16) for _ in range(2))
    positions = np.arange(30, 70)[None]
    want = np.asarray(jax_fa.reference.prefill_attention(q, k, v, positions))
    outs = []
    for kernel in jax_fa.available_kernels():
        outs.append(np.asarray(jax_fa.prefill_attention(q, k, v, positions, implementation=kernel)))
        assert np.abs(outs[-1] - want).max() < 5e-3, kernel
    bits = b"".join(out.tobytes() for out in outs)
    print("attended", hashlib.sha256(bits).hexdigest(), flush=True)

def explain_shapes():
    cache = jax.ShapeDtypeStruct((1, 70, 2, 64), jnp.float16)
    positions = jax.ShapeDtypeStruct((1, 40), jnp.int32)
    q = jax.ShapeDtypeStruct((1, 40, 4, 64), jnp.float32)
    assert jax_fa.explain(q, cache, cache, positions).kernel == jax_fa.available_kernels()[0]
    print("explained", flush=True)

def in_a_fork(work):
    child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        child.start()
    child.join({seconds})
    assert child.exitcode == 0, child.exitcode
    return any("JAX is multithreaded" in str(warning.message) for warning in caught)
"""

FORKED_BEFORE = """
assert not in_a_fork(attend), "jax_fa's import started a backend"
attend()
"""

FORKED_AFTER = """
attend()
assert in_a_fork(explain_shapes)
attend()
"""


@forks
def test_a_process_forked_after_the_import_works_and_so_does_its_parent():
    printed = run_script(START.format(seconds=SECONDS) + FORKED_BEFORE, **SHARED).splitlines()
    assert len(printed) == 2 and printed[0] == printed[1]


@forks
def test_a_fork_after_the_first_call_harms_neither_its_parent_nor_what_runs_on_no_device():
    """That the child may not compute is JAX's rule, which it warns of."""
    printed = run_script(START.format(seconds=SECONDS) + FORKED_AFTER, **SHARED).splitlines()
    assert [line.split()[0] for line in printed] == ["attended", "explained", "attended"]
    assert printed[0] == printed[2]
