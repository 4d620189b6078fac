"""Two devices in one process, and calls split over them: two GPUs where there are, two of a CPU.

In processes of their own, where no device has been called before.
"""

import os

import jax
import pytest
from scripts import run_cases

# What eight devices of a CPU show of every way to split, two GPUs need show of the main ones only.
SPLIT = (
    "without_moving or test_shard_map or stay_in_the_types or move_states"
    " or (test_gradients and not slots and not shared) or (shared_cache and not tokens_and)"
    " or (test_slots and growing and True)"
    " or test_slots_of_stacks or test_stacks_in_shard_map"
)


@pytest.fixture(params=["cpu", "gpu"])
def environment(request):
    """Of a process with two devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    if request.param == "cpu":
        two = "--xla_force_host_platform_device_count=2"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {two}"}
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs in one process; a machine with two NVIDIA GPUs runs this")
    # This process holds memory of both GPUs already. No products are timed against each other:
    # what they compute is compared, and trying them takes most of the time to compile.
    quick = "--xla_gpu_autotune_level=0"
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": f"{flags} {quick}"}


def test_one_process_with_two_devices(environment):
    run_cases("two_devices.py", **environment)


def test_calls_split_over_two_devices(environment):
    run_cases("eight_devices*.py", "-k", SPLIT, **environment)
