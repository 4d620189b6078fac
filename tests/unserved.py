"""A call that only the handler can refuse, since it names a kernel that no build has.

As an exported program does that names a kernel of another build: none of the Python checks are in
its way, all of JAX's transformations are.
"""

from __future__ import annotations

from jax_fa import transforms
from jax_fa.operands import Operands, Options

REFUSAL = "jax_fa.prefill_attention: implementation='of_another_build' is not "

_CONFIG = transforms.Config(
    Options(scale=0.125, chunk_invariant=True), implementation="of_another_build", return_lse=False
)


def attend_unserved(q, k, v, positions):
    """Out, which never comes to be."""
    return transforms.attend(_CONFIG, Operands(q, k, v, positions))[0]
