"""Byte-level BPE built from the vocabulary, merges and chat template in the GGUF metadata."""

from typing import Any, NamedTuple

import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

# The value of GGUF's tokenizer.ggml.token_type that marks a special token such as <|im_start|>.
CONTROL_TOKEN = 3


class Tokenizer(NamedTuple):
    """Text to ids and back."""

    bpe: tokenizers.Tokenizer
    end_of_text: int
    chat_template: str

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written out in it are recognised, none are added."""
        return self.bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens included; an incomplete UTF-8 sequence shows as U+FFFD."""
        return self.bpe.decode(ids, skip_special_tokens=False)

    def chat_prompt(self, message: str) -> str:
        """`message` as the user's turn, with the header of the assistant's turn after it."""
        # The template is a program that came with the file, hence the sandbox.
        template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(self.chat_template)
        messages = [{"role": "user", "content": message}]
        return template.render(messages=messages, add_generation_prompt=True)


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the metadata describes.

    Raises:
        ValueError: the file was made for another kind of tokenizer.
    """
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the file's tokenizer is {kind}; this example builds ('gpt2', 'smollm').")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    bpe.add_special_tokens(
        [t for t, type_ in zip(tokens, types, strict=True) if type_ == CONTROL_TOKEN]
    )
    return Tokenizer(
        bpe, metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.chat_template"]
    )
