"""Errors that only the handler can find: raised where a result is awaited, and JAX goes on after.

On a GPU the call has long returned by then; on a CPU it may raise at once.
"""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_same_bits
from cases import Case
from jax import export
from scripts import run_script
from unserved import REFUSAL, attend_unserved

import jax_fa

CASE = Case("runtime_errors", batch=2, q_len=20, n_past=30, placement="anywhere")


def in_scan(q, k, v, positions):
    def layer(x, _):
        return attend_unserved(x, k, v, positions), None

    return jax.lax.scan(layer, q, None, length=3)[0]


def in_vmap(*operands):
    return jax.vmap(attend_unserved)(*(jnp.stack([x, x]) for x in operands))


def in_grad(q, *others):
    return jax.grad(lambda q: attend_unserved(q, *others).sum())(q)


def in_what_depends_on_it(*operands):
    return jnp.sin(attend_unserved(*operands)).sum()


def in_a_branch(q, *others):
    return jax.lax.cond(others[2].sum() != 0, attend_unserved, lambda q, *_: q, q, *others)


WAYS = [attend_unserved, in_scan, in_vmap, in_grad, in_what_depends_on_it, in_a_branch]


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_is_raised_where_the_result_is_awaited(way, compiled):
    arrays = CASE.arrays()

    def attend_by_every_kernel():
        kernels = jax_fa.available_kernels()
        return [jax_fa.prefill_attention(*arrays, implementation=kernel) for kernel in kernels]

    want = attend_by_every_kernel()
    function = jax.jit(way) if compiled else way
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
            jax.block_until_ready(function(*arrays))
        for a, b in zip(attend_by_every_kernel(), want, strict=True):
            assert_same_bits(a, b)


def test_an_exported_program_that_names_a_kernel_of_another_build_is_refused():
    pytest.importorskip("flatbuffers", reason="serialising a program needs flatbuffers")
    arrays = CASE.arrays()
    exported = export.export(jax.jit(attend_unserved), disabled_checks=jax_fa.export_checks())
    again = export.deserialize(exported(*arrays).serialize())
    with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
        jax.block_until_ready(again.call(*arrays))


def test_threads_get_the_errors_of_their_own_calls():
    arrays = CASE.arrays()
    want = np.asarray(jax_fa.prefill_attention(*arrays))

    def good():
        return np.asarray(jax_fa.prefill_attention(*arrays))

    def bad():
        return np.asarray(attend_unserved(*arrays))

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(work) for _ in range(10) for work in (good, bad)]
        for future in running[::2]:
            assert_same_bits(future.result(120), want)
        for future in running[1::2]:
            with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
                future.result(120)


UNAWAITED = """
import sys
sys.path.append({tests!r})
import jax, numpy as np
from cases import Case
from unserved import attend_unserved
import jax_fa
arrays = Case("unawaited", q_len=20).arrays()
attend, fail = jax.jit(jax_fa.prefill_attention), jax.jit(attend_unserved)
want = np.asarray(attend(*arrays))
outs = []
for _ in range(20):
    outs.append(attend(*arrays))
    try:
        fail(*arrays)
    except jax.errors.JaxRuntimeError:
        pass
    outs.append(attend(*arrays))
assert all((np.asarray(out) == want).all() for out in outs)
try:
    fail(*arrays)  # nobody will have waited for it when the process ends
except jax.errors.JaxRuntimeError:
    pass
print("usable")
"""


def test_errors_that_nobody_awaits_harm_no_neighbour_and_no_exit(request):
    script = UNAWAITED.format(tests=str(request.path.parent))
    assert "usable" in run_script(script, XLA_PYTHON_CLIENT_PREALLOCATE="false")
