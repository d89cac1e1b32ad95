"""``python -m ds_ext run``: runs a program with our optimizers registered in DeepSpeed.

This process becomes the program (``exec``). Only PYTHONPATH changes: it begins with a folder that
contains a ``sitecustomize`` module. Python imports that module when it starts, also in all child
processes. The module registers a hook for the import of DeepSpeed.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_ext.registration import IMPORTS

DESCRIPTION = (
    "Runs an unmodified program, TARGET, with the optimizers of ds_ext. DeepSpeed knows them in it "
    "and in all processes that it starts. Launchers can start it too: "
    "torchrun ... -m ds_ext run ..., accelerate launch -m ds_ext run ..., "
    "deepspeed --module ds_ext run ..."
)
CHILDREN = Path(__file__).parent / "children"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``run``. TARGET and its own arguments follow them."""
    parser.usage = "python -m ds_ext run [-h] [--import MODULE] [-m] TARGET [ARGUMENT ...]"
    parser.add_argument("-m", dest="is_module", action="store_true", help="TARGET is a module")
    what = "a Python file, a command such as trl or torchrun, or with -m a module; and arguments"
    parser.add_argument("target", metavar="TARGET", nargs=argparse.REMAINDER, help=what)


def run(options: argparse.Namespace) -> None:
    """Becomes the program; ValueError if it does not exist, or if Python ignores PYTHONPATH."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ValueError("python -E, -I and -S keep PYTHONPATH or site from the program.")
    arguments = [] if options.local_rank is None else [f"--local_rank={options.local_rank}"]
    command = _command(options.target, options.is_module, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], command, environment(os.environ, options.imports))
    except OSError as error:
        raise ValueError(f"{command[0]}: {error.strerror}") from None


def environment(current: Mapping[str, str], imports: Sequence[str] = ()) -> dict[str, str]:
    """Returns an environment in which Python registers our optimizers when it starts.

    Args:
        current: the environment of this process.
        imports: modules to import with DeepSpeed; the program finds those of this folder too.
    """
    folder = os.getcwd() if imports else None
    paths = filter(None, [str(CHILDREN), current.get("PYTHONPATH"), folder])
    own = {IMPORTS: " ".join(imports)} if imports else {}
    return {**current, "PYTHONPATH": os.pathsep.join(paths), **own}


def _command(target: list[str], is_module: bool, first: list[str]) -> list[str]:
    """The program and its arguments. Those of a launcher come ``first``."""
    if not target:
        raise ValueError("TARGET is missing: a Python file, a command, or -m and a module.")
    name, *rest = target
    if name.startswith("-"):
        raise ValueError(f"unknown option {name}: the options of TARGET follow TARGET.")
    python = [sys.executable, *_flags(sys.orig_argv)]
    if is_module:
        return [*python, "-m", name, *first, *rest]
    path = Path(name)
    is_executable = path.is_file() and path.suffix != ".py" and os.access(path, os.X_OK)
    if path.exists() and not is_executable:
        return [*python, name, *first, *rest]
    found = os.path.abspath(path) if is_executable else shutil.which(name)
    if found is None:
        raise ValueError(f"TARGET {name}: no such file, nor a command on PATH (-m for a module).")
    return [found, *first, *rest]


def _flags(argv: list[str]) -> list[str]:
    """The options of this Python process, which come before "-m ds_ext"."""
    before = argv[1:]
    ends = [i for i, argument in enumerate(before) if argument.startswith("-m")]
    return before[: ends[0]] if ends else []
