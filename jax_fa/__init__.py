"""jax_fa: prefill attention against a preallocated KV cache, with positions as data.

    out = jax_fa.prefill_attention(q, k, v, positions)

Start with :func:`prefill_attention`; :func:`update_kv_cache` fills the cache it reads,
:func:`merge_states` joins results over disjoint parts of a cache,
:func:`sequence_parallel_prefill_attention` does so over devices, :func:`explain` says which kernel
serves a call and why the others do not. :mod:`jax_fa.reference` is the definition they all answer
to, in plain ``jax.numpy``.
"""

from importlib.metadata import version as _version

from jax_fa import native, reference
from jax_fa.aot import export_checks
from jax_fa.api import prefill_attention
from jax_fa.dispatch import Explanation, available_kernels, explain
from jax_fa.kv_cache import update_kv_cache
from jax_fa.sequence_parallel import sequence_parallel_prefill_attention
from jax_fa.states import merge_states

# Here, not on the first call: an exported program finds the handlers without calling any of this.
native.load()

__version__ = _version("jax-fa")

__all__ = [
    "Explanation",
    "__version__",
    "available_kernels",
    "explain",
    "export_checks",
    "merge_states",
    "prefill_attention",
    "reference",
    "sequence_parallel_prefill_attention",
    "update_kv_cache",
]
