"""C7 on a GPU: the call is captured into a command buffer, and replays with other data.

Capture itself is the proof that a launch neither synchronises nor allocates: CUDA fails both while
a stream is captured.
"""

import jax
import pytest
from scripts import run_script

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="command buffers are a GPU's; an NVIDIA GPU runs this"
)

SCRIPT = """
import glob, os, pathlib, re, sys
dump, kernel, stacked, slots = {dump!r}, {kernel!r}, {stacked!r}, {slots!r}
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1 --xla_dump_to=" + dump
)
import jax, jax.numpy as jnp, numpy as np, jax_fa

rng = np.random.default_rng(148)
q = jnp.asarray(rng.standard_normal((2, 3, 4, 64)), jnp.float16)
layers = (3,) if stacked else ()
k, v = (jnp.asarray(rng.standard_normal((*layers, 2, slots, 2, 64)), jnp.float16) for _ in range(2))

def three_calls(q, k, v, positions, layer):
    for _ in range(3):
        q = jax_fa.prefill_attention(
            q, k, v, positions, layer=layer if stacked else None, implementation=kernel,
            chunk_invariant=slots < 1000,
        )
    return q

@jax.jit
def captured(*operands):
    return three_calls(*operands)

rows = np.arange(3, dtype=np.int32)
starts = [0, 0], [400, 7], [slots - 3, slots - 3], [-3, -3], [0, 0], [250, 63]
seen = set()
for start, layer in zip(starts, (0, 2, 1, 0, 7, -1)):
    positions = jnp.asarray(np.asarray(start, np.int32)[:, None] + rows)
    operands = q, k, v, positions, jnp.int32(layer)
    for _ in range(3):
        got = np.asarray(captured(*operands))
    want = np.asarray(three_calls(*operands))
    assert (got.view(np.uint16) == want.view(np.uint16)).all(), (start, layer)
    seen.add(want.tobytes())
assert len(seen) == (6 if stacked else 5), len(seen)

texts = {{
    path: pathlib.Path(path).read_text(errors="replace")
    for path in glob.glob(dump + "/*captured*thunk*")
}}
both = ("kCommandBuffer", "kCustomCall")
inside = [path for path, text in texts.items() if all(kind in text for kind in both)]
assert inside, "no command buffer holds the call; files: " + ", ".join(sorted(texts))
print("captured", len(inside))
"""


def test_c7_captured_calls_replay_with_other_positions(kernel, tmp_path):
    script = SCRIPT.format(dump=str(tmp_path), kernel=kernel, stacked=False, slots=500)
    assert "captured" in run_script(script)


def test_c7_captured_calls_that_may_split_the_slots_replay_too(kernel, tmp_path):
    script = SCRIPT.format(dump=str(tmp_path), kernel=kernel, stacked=False, slots=3000)
    assert "captured" in run_script(script)


def test_c7_captured_calls_of_stacked_caches_replay_with_another_layer(kernel, tmp_path):
    script = SCRIPT.format(dump=str(tmp_path), kernel=kernel, stacked=True, slots=500)
    assert "captured" in run_script(script)


REFUSED = """
import os, sys
sys.path.append({tests!r})
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_graph_min_graph_size=1"
)
import jax, numpy as np
from cases import Case
from unserved import REFUSAL, attend_unserved
import jax_fa
q, *others = Case("refused", q_len=20).arrays()

def three(attend):
    def layers(q, *others):
        for _ in range(3):
            q = attend(q, *others)
        return q
    return jax.jit(layers)

served, refused = three(jax_fa.prefill_attention), three(attend_unserved)
want = np.asarray(served(q, *others))
for _ in range(4):
    try:
        jax.block_until_ready(refused(q, *others))
    except jax.errors.JaxRuntimeError as error:
        assert REFUSAL in str(error), error
    else:
        raise AssertionError("the call was served")
    assert (np.asarray(served(q, *others)) == want).all()
print("usable")
"""


def test_a_call_that_is_refused_while_it_is_captured_leaves_the_stream_usable(request):
    assert "usable" in run_script(REFUSED.format(tests=str(request.path.parent)))
