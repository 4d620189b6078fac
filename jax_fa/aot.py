"""What ahead-of-time users need: ``jax.export`` and programs that outlive a process."""

from __future__ import annotations

import jax

from jax_fa import native


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The value for ``jax.export.export(..., disabled_checks=...)``.

    jax.export refuses custom calls it does not know to be stable. This is: its name,
    ``jax_fa_prefill_attention_v2``, carries the version of how it tells operands and attributes.
    The names of version 1 (``jax_fa_prefill_attention_v1``, and with a layer
    ``jax_fa_stacked_prefill_attention_v1``) are here too, and programs that hold them run. A
    process that runs such an artefact must have imported ``jax_fa``, which registers the handlers.
    One artefact may be for "cpu" and "cuda"; the kernel is chosen where it runs. Serialising needs
    the package ``flatbuffers``.

        exported = jax.export.export(
            jax.jit(step), platforms=("cpu", "cuda"), disabled_checks=jax_fa.export_checks()
        )(*shapes)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in native.TARGETS]
