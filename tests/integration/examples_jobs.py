"""The examples as they are run, in short form: jobs of test_examples.py."""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests import worlds

EXAMPLES = worlds.ROOT / "examples"


def run(name: str, folder: str, *options: str) -> str:
    """What ``python examples/NAME`` prints, run in this process from the folder ``folder``.

    The process group outlives it, as the next job needs it; that an example ends with destroying it
    is asserted.
    """
    argv = [str(EXAMPLES / name), "--out", f"{folder}/out", *options]
    printed = io.StringIO()
    os.chdir(folder)
    ended = mock.Mock()
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        _imported_anew(),
        mock.patch.object(dist, "destroy_process_group", ended),
        contextlib.redirect_stdout(printed),
        torch.random.fork_rng(devices=[]),
    ):
        runpy.run_path(argv[0], run_name="__main__")
    ended.assert_called_once_with()
    return printed.getvalue()


@contextlib.contextmanager
def _imported_anew() -> Iterator[None]:
    """Forgets what an example imports from its folder, such as tiny.py, when it ends."""
    yield
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and EXAMPLES in Path(file).parents:
            del sys.modules[name]


def first_life(name: str, folder: str, *options: str) -> str:
    """The same as torchrun starts it for the first time."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    return run(name, folder, *options)
