"""The compiled module: loaded once, checked against the running jaxlib, registered with XLA."""

from __future__ import annotations

import functools
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import jax

# The name under which XLA finds the handlers, in compiled and in exported programs. Operands and
# attributes are told by name, and more of them need no new one: what is absent has its default.
PREFILL_TARGET = "jax_fa_prefill_attention_v2"
# In the order of _native.registrations(). Programs that version 1 exported hold the other two.
TARGETS = (
    PREFILL_TARGET,
    "jax_fa_prefill_attention_v1",
    "jax_fa_stacked_prefill_attention_v1",
)


def _runtime_ffi_version() -> tuple[int, int]:
    """The XLA FFI version of the installed jaxlib, read from the header it ships."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    numbers = [
        re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")
    ]
    if None in numbers:
        raise ImportError(
            f"jaxlib {version('jaxlib')} does not state its XLA FFI version where jax_fa looks "
            "for it; install a jaxlib that jax_fa supports (0.10.2 or newer)."
        )
    major, minor = (int(number[1]) for number in numbers if number is not None)
    return major, minor


def check_ffi_version(built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Raises ImportError if handlers built for version ``built`` cannot be registered.

    Registering them all the same would not fail here: it would stop JAX's backends from starting,
    with a message that does not name jax_fa.
    """
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise ImportError(
            f"jax_fa was built against XLA FFI {built[0]}.{built[1]}, and the installed jaxlib "
            f"offers {runtime[0]}.{runtime[1]}; the built version must not be the newer one. "
            "Upgrade jaxlib (pip install -U jax jaxlib), or reinstall jax_fa from source with "
            "build isolation on, which builds against the oldest version supported."
        )


@functools.cache
def load() -> ModuleType:
    """The compiled module, with its handlers registered."""
    try:
        from jax_fa import _native
    except ImportError as error:
        raise ImportError(
            f"jax_fa's compiled module cannot be loaded ({error}). From a source checkout, install "
            "it first: pip install . (and do not run Python in the checkout's root, where the "
            "uncompiled package hides the installed one)."
        ) from error
    check_ffi_version(_native.ffi_api_version, _runtime_ffi_version())
    for platform, handlers in _native.registrations().items():
        for target, handler in zip(TARGETS, handlers, strict=True):
            jax.ffi.register_ffi_target(target, handler, platform=platform)
    return _native
