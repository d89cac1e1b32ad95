"""Python in a process of its own, which may fork ranks; the command line in this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
OWN |= {"HF_HUB_OFFLINE": "1"}


def python(
    *arguments: object, cwd: Path = ROOT, given: str = "", timeout: float = 900,
    fails: bool = False, **own: str | None
) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Runs ``python arguments`` in ``cwd``, with the repository on its path and ``given`` on stdin.

    ``own`` changes its environment; None takes a variable out. Unless it ``fails``, an exit
    status is an AssertionError, with the end of what it wrote.
    """
    environment = {k: v for k, v in (os.environ | OWN | own).items() if v is not None}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert fails or done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs ``python -m ds_ext ARGUMENTS``, which must fail -> what it prints to stderr.

    The exit status must be 2, and nothing may be printed to stdout.
    """
    from ds_ext.commands.cli import main  # processes import this file before ds_ext

    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    return printed.err
