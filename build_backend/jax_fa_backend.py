"""PEP 517 backend: scikit-build-core, plus NVIDIA's compiler wheels where no usable nvcc is found.

The environment variable JAX_FA_CUDA decides: ``auto`` (default; the system's nvcc if it is new
enough, the wheels otherwise), ``system``, ``wheels`` or ``off``. cmake/FindNvcc.cmake applies the
same rule when it looks for the compiler this file has asked for.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from typing import Any

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403

# The first CUDA release with the driver ABI that jax[cuda13] runs on.
MIN_CUDA = (13, 0)

# Pinned together: these wheels do not pin each other, and a mixture does not compile.
CUDA_WHEELS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]

MODES = ("auto", "system", "wheels", "off")


def _nvcc_candidates() -> list[str | None]:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT")]
    return [
        os.environ.get("CUDACXX"),
        *(os.path.join(home, "bin", "nvcc") for home in homes if home),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]


def _cuda_release(nvcc: str) -> tuple[int, int]:
    try:
        result = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return (0, 0)
    match = re.search(r"release (\d+)\.(\d+)", result.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _system_nvcc_is_usable() -> bool:
    return any(
        path and os.path.exists(path) and _cuda_release(path) >= MIN_CUDA
        for path in _nvcc_candidates()
    )


def _cuda_requires() -> list[str]:
    mode = os.environ.get("JAX_FA_CUDA", "auto").lower()
    if mode not in MODES:
        raise ValueError(f"JAX_FA_CUDA={mode!r} is not one of {', '.join(MODES)}")
    has_wheels = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    if mode in ("off", "system") or not has_wheels:
        return []
    if mode == "auto" and _system_nvcc_is_usable():
        return []
    return list(CUDA_WHEELS)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """The build requirements of a wheel: scikit-build-core's and, if needed, a CUDA compiler."""
    return _scikit_build.get_requires_for_build_wheel(config_settings) + _cuda_requires()


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """The build requirements of an editable install; as for a wheel."""
    return _scikit_build.get_requires_for_build_editable(config_settings) + _cuda_requires()
