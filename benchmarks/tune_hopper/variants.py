"""The builds of the Hopper kernel that are compared: what each changes of its base tuning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "cuda/hopper/builds.def"


@dataclass(frozen=True)
class Variant:
    """One build: a tuning of cuda/hopper/config.cuh and what it overrides of it."""

    head_dim: int
    base: str
    changes: dict[str, int] = field(default_factory=dict)
    element: str = "__nv_bfloat16"
    query: str = ""  # "float" for a float32 q; the element otherwise
    defines: tuple[str, ...] = ()

    def source(self, name: str) -> str:
        """A translation unit whose only export, `launch`, enqueues this build."""
        changes = "".join(
            f"  static constexpr int {name} = {value};\n" for name, value in self.changes.items()
        )
        query = self.query or self.element
        return (
            '#include "cuda/hopper/launch.cuh"\n\n'
            "using namespace jax_fa::cuda::hopper;\n\n"
            f"struct {name} : {self.base} {{\n{changes}}};\n\n"
            'extern "C" int launch(const jax_fa::AttentionParams* params, cudaStream_t stream) {\n'
            f"  return Launch<Config<{self.element}, {query}, {self.head_dim}, {name}>>"
            "(*params, stream);\n}\n"
        )


def _built() -> dict[str, Variant]:
    """The rows of cuda/hopper/builds.def: what the library has, by name."""
    rows = re.findall(
        r"^BUILD\((\w+), (\d+), ([\w<>]+), \w+, \w+\)$", TABLE.read_text(), re.MULTILINE
    )
    return {name: Variant(int(head_dim), tuning) for name, head_dim, tuning in rows}


VARIANTS: dict[str, Variant] = {
    **_built(),
    "d128_wait": Variant(128, "Tuning128", {"kSoftmaxUnderOutput": 0}),
    "d128_wide_f16": Variant(128, "Tuning128Wide", element="__half"),
    "d128_f16": Variant(128, "Tuning128", element="__half"),
    "d128_f32q": Variant(128, "Tuning128", query="float"),
    "d64_w2": Variant(64, "Tuning64", {"kConsumers": 2}),
    "d64_f16": Variant(64, "Tuning64", element="__half"),
    "d64_f32q": Variant(64, "Tuning64", query="float"),
    "d256_wait": Variant(256, "Tuning256", {"kSoftmaxUnderOutput": 0}),
    "d256_kv64": Variant(256, "Tuning256", {"kTileKV": 64}),
    "d256_kv64s5": Variant(256, "Tuning256", {"kTileKV": 64, "kKvStages": 5}),
    "d256_f16": Variant(256, "Tuning256", element="__half"),
    "d256_f32q": Variant(256, "Tuning256", query="float"),
}
