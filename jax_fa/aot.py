"""What ahead-of-time users need: ``jax.export`` and programs that outlive a process."""

from __future__ import annotations

import jax

from jax_fa import native


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The value for ``jax.export.export(..., disabled_checks=...)``.

    jax.export refuses custom calls it does not know to be stable. These are: their names carry the
    version of their operands and attributes (``jax_fa_prefill_attention_v1``, and with a layer
    ``jax_fa_stacked_prefill_attention_v1``), and a change to either gets a new name. A process that
    runs such an artefact must have imported ``jax_fa``, which registers the handlers. One artefact
    may be for "cpu" and "cuda"; the kernel is chosen where it runs. Serialising needs the package
    ``flatbuffers``.

        exported = jax.export.export(
            jax.jit(step), platforms=("cpu", "cuda"), disabled_checks=jax_fa.export_checks()
        )(*shapes)
    """
    targets = (native.PREFILL_TARGET, native.STACKED_PREFILL_TARGET)
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
