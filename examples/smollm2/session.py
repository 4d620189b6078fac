"""One sequence being extended: its cache, how far it is filled, and the feeding of blocks to it."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from smollm2.model import Attention, empty_cache, step
from smollm2.weights import Model


class Session:
    """A sequence of at most `capacity` tokens, and the cache that holds it.

    Source: chunked prefill as in Agrawal et al., "SARATHI" (2023): a prompt is cut into blocks of
    equal size, each of which attends to itself and to the cache of all before it.
    """

    def __init__(self, model: Model, capacity: int, attention: Attention) -> None:
        if capacity > model.config.context_length:
            raise ValueError(
                f"{capacity} tokens asked for, but the model was trained for a context of "
                f"{model.config.context_length}; shorten the prompt or generate fewer tokens."
            )
        self.model = model
        self.capacity = capacity
        self.attention = attention
        self.filled = 0
        self.cache = empty_cache(model.config, capacity)

    def warm_up(self, q_len: int) -> None:
        """Compiles and runs the step for blocks of `q_len` tokens, leaving the sequence as it is.

        All rows are padding, and padding rows write nothing to the cache.
        """
        self._step([], q_len, np.zeros(1, np.int32)).block_until_ready()

    def extend(
        self,
        tokens: Sequence[int],
        *,
        chunk: int | None = None,
        last: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> jax.Array:
        """Appends `tokens` to the sequence.

        Args:
            tokens: at least `last` of them.
            chunk: block size; the last block is padded to it. None: all tokens in one block.
            last: how many logits to return.
            progress: called after each block with the number of tokens done so far.

        Returns:
            [last, vocab] float32: logits after each of the last `last` tokens.
        """
        if self.filled + len(tokens) > self.capacity:
            raise ValueError(
                f"the session holds {self.filled} of {self.capacity} tokens; {len(tokens)} more do "
                "not fit."
            )
        if not 1 <= last <= len(tokens):
            raise ValueError(f"last is {last}; it must lie between 1 and {len(tokens)} (tokens).")
        chunk = chunk or len(tokens)
        first_wanted = len(tokens) - last
        kept = []
        for start in range(0, len(tokens), chunk):
            block = tokens[start : start + chunk]
            # Rows past the block's end only keep the shape of the step the same; they are cut off.
            first = max(first_wanted - start, 0)
            rows = np.minimum(first + np.arange(min(last, chunk), dtype=np.int32), chunk - 1)
            logits = self._step(block, chunk, rows)
            if first < len(block):
                kept.append(logits[: len(block) - first])
            if progress is not None:
                logits.block_until_ready()
                progress(start + len(block))
        return jnp.concatenate(kept)

    def _step(self, block: Sequence[int], q_len: int, rows: np.ndarray) -> jax.Array:
        """Runs one block, padded to `q_len` rows, and returns the logits of `rows`."""
        tokens = np.zeros(q_len, np.int32)
        positions = np.full(q_len, -1, np.int32)
        tokens[: len(block)] = block
        positions[: len(block)] = self.filled + np.arange(len(block))
        logits: jax.Array
        logits, self.cache = step(
            self.model.weights,
            self.cache,
            tokens,
            positions,
            rows,
            config=self.model.config,
            attention=self.attention,
        )
        self.filled += len(block)
        return logits
