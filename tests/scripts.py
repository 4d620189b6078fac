"""Python scripts in a process of their own, for what is global to a process."""

from __future__ import annotations

import os
import subprocess
import sys


def run_script(script: str, **environment: str) -> str:
    """Runs ``script``; its standard output. Fails with its standard error if it does not succeed.

    -P: the working directory stays off the path, where the uncompiled package could hide the
    installed one.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
