"""The machine code of the CUDA kernels, read without a GPU."""

import importlib.util

import pytest
import sass

import jax_fa

ARCHITECTURES = jax_fa.native.load().cuda_architectures or ""

pytestmark = [
    pytest.mark.skipif(
        not ARCHITECTURES, reason="no CUDA kernels to read; a build with CUDA runs this"
    ),
    pytest.mark.skipif(
        sass.find_cuobjdump() is None,
        reason="needs cuobjdump and nvdisasm, of a CUDA toolkit or from PyPI",
    ),
]


@pytest.fixture(scope="module")
def kernels():
    """Every kernel of the installed module for Hopper."""
    if "90a" not in ARCHITECTURES:
        pytest.skip(f"this build is for {ARCHITECTURES}; one with 90a-real runs this")
    library = importlib.util.find_spec("jax_fa._native").origin
    return sass.functions(library, "sm_90a")


def test_hopper_kernels_multiply_on_wgmma(kernels):
    hopper = [kernel for kernel in kernels if "hopper" in kernel.name]
    assert hopper
    for kernel in hopper:
        assert kernel.count("HGMMA"), kernel.name
        assert kernel.count("UTMALDG"), f"{kernel.name} loads nothing by TMA"
        assert kernel.count("USETMAXREG"), f"{kernel.name} has no register split"


def test_hopper_main_loops_keep_descriptors_in_uniform_registers(kernels):
    """R2UR before each HGMMA is what a divergent branch in the loop costs: a third of the speed."""
    for kernel in kernels:
        if "hopper" in kernel.name:
            loop = kernel.main_loop(HGMMA=8, MUFU=40)  # both products, a tile's exponentials
            assert loop["HGMMA"] >= 8, f"{kernel.name}: no main loop found"
            assert loop["R2UR"] == 0, f"{kernel.name}: {loop['R2UR']} R2UR in the main loop"


def test_hopper_waits_for_products_in_no_branch(kernels):
    """A wait for products is the whole warpgroup's. In a branch it would be that of the warps that
    take it, which PTX leaves undefined (wgmma.wait_group). The source has four, none in a branch;
    one more would be a second way to the same point."""
    for kernel in kernels:
        if "hopper" in kernel.name:
            waits = sum(op.startswith("WARPGROUP.DEPBAR") for _, op, _ in kernel.code)
            assert waits == 4, f"{kernel.name}: {waits} waits"


def test_hopper_producers_use_no_register_that_they_have_given_away(kernels):
    """Their code lies before the consumers take registers, but for retries of their waits."""
    for kernel in kernels:
        if "hopper" not in kernel.name:
            continue
        budgets = {op: (at, x) for at, op, x in kernel.code if op.startswith("USETMAXREG")}
        _, kept = budgets["USETMAXREG.DEALLOC.CTAPOOL"]
        consumers, _ = budgets["USETMAXREG.TRY_ALLOC.CTAPOOL"]
        loads = [at for at, op, _ in kernel.code if op.startswith("UTMALDG")]
        assert max(loads) < consumers, f"{kernel.name}: producers' code lies elsewhere"
        assert kernel.highest_register(consumers) < int(kept.split("0x")[1], 16), kernel.name


def test_no_kernel_uses_local_memory(kernels):
    for kernel in kernels:
        assert kernel.count("LDL") + kernel.count("STL") == 0, kernel.name
