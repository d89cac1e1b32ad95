"""Python in a process of its own, which has not run backward and may fork ranks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*arguments: str, timeout: float = 900) -> str:
    """Runs ``python arguments`` in the repository's root -> what it wrote to stderr.

    AssertionError, with the end of all that it wrote, if it fails.
    """
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr
