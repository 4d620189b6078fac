"""Reads a llama-architecture GGUF file: hyper-parameters from the metadata, weights to float32."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from gguf import GGUFReader, dequantize

from smollm2.model import Config, Layer, Weights
from smollm2.tokenizer import Tokenizer, build_tokenizer

# Field of `Layer` -> name of the tensor in the file, after "blk.<n>.".
LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "w_gate": "ffn_gate",
    "w_up": "ffn_up",
    "w_down": "ffn_down",
}


class Model(NamedTuple):
    """Everything a GGUF file holds."""

    config: Config
    weights: Weights
    tokenizer: Tokenizer


def load_model(path: Path) -> Model:
    """Loads a GGUF file.

    Raises:
        ValueError: the file holds something this example does not implement.
    """
    reader = GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = read_config(metadata)
    return Model(config, read_weights(reader, config), build_tokenizer(metadata))


def read_config(metadata: dict[str, Any]) -> Config:
    """Hyper-parameters; refuses variants of the architecture that `model.py` does not compute."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"the file's architecture is {architecture}; this example runs llama.")
    head_dim = metadata["llama.embedding_length"] // metadata["llama.attention.head_count"]
    rope_dim = metadata["llama.rope.dimension_count"]
    if rope_dim != head_dim:
        raise ValueError(f"rotary dimension {rope_dim} differs from head_dim {head_dim}.")
    scaling = [name for name in metadata if name.startswith("llama.rope.scaling")]
    if scaling:
        raise ValueError(f"rope scaling is not implemented here; the file asks for {scaling}.")
    return Config(
        layers=metadata["llama.block_count"],
        model_dim=metadata["llama.embedding_length"],
        q_heads=metadata["llama.attention.head_count"],
        kv_heads=metadata["llama.attention.head_count_kv"],
        head_dim=head_dim,
        rope_theta=metadata["llama.rope.freq_base"],
        norm_epsilon=metadata["llama.attention.layer_norm_rms_epsilon"],
        context_length=metadata["llama.context_length"],
    )


def read_weights(reader: GGUFReader, config: Config) -> Weights:
    """Dequantises every tensor to float32; matrices come out [out, in]."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def take(name: str) -> jax.Array:
        tensor = tensors.pop(f"{name}.weight")
        return jnp.asarray(dequantize(tensor.data, tensor.tensor_type))

    embedding = take("token_embd")
    weights = Weights(
        embedding=embedding,
        layers=tuple(
            Layer(**{field: take(f"blk.{n}.{name}") for field, name in LAYER_TENSORS.items()})
            for n in range(config.layers)
        ),
        final_norm=take("output_norm"),
        unembedding=take("output") if "output.weight" in tensors else embedding,
    )
    if tensors:
        raise ValueError(f"the file holds tensors this example would ignore: {sorted(tensors)}.")
    return weights
