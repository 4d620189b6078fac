"""Python scripts in a process of their own, for what is global to a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: str, *, timeout: float = 900, **environment: str) -> str:
    """Runs ``script``; its standard output. Fails with its standard error if it does not succeed.

    One that hangs fails after ``timeout`` seconds. -P: the working directory stays off the path,
    where the uncompiled package could hide the installed one.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


_RUN_CASES = """
import sys
sys.stdout = sys.stderr  # what run_script shows of a failure
import pytest
raise SystemExit(pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", *{arguments!r}]))
"""


def run_cases(pattern: str, *arguments: str, **environment: str) -> None:
    """Runs the test modules of this folder that ``pattern`` names by pytest, as a script."""
    paths = sorted(str(path) for path in Path(__file__).parent.glob(pattern))
    run_script(_RUN_CASES.format(arguments=[*paths, *arguments]), **environment)
