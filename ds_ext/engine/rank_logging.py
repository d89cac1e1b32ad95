"""Shows log lines, warnings and tracebacks once, not on every rank."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.utils import cpp_extension

from ds_ext import logs
from ds_ext.distributed import consensus

_ON_ALL_RANKS = "_ds_ext_on_all_ranks"  # an attribute of errors that every rank raises


def log(message: str) -> None:
    """Writes a line to the logger "ds_ext", on the first rank only."""
    logs.show_by_default()
    if consensus.is_first():
        logs.logger.info(message)


def show(message: str) -> None:
    """Shows a line on the first rank, with any logging configuration."""
    if consensus.is_first():
        logs.show(message)


def warn(message: str) -> None:
    """Writes a warning to the logger "ds_ext", on the first rank only."""
    logs.show_by_default()
    if consensus.is_first():
        logs.logger.warning(message)


# Tracebacks of errors that all ranks raise.


@contextmanager
def traceback_once(kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Context that shortens errors of these types; see ``shorten_traceback``."""
    try:
        yield
    except kinds as error:
        shorten_traceback(error)
        raise


def shorten_traceback(error: BaseException) -> None:
    """Makes an uncaught error print one line instead of a traceback, except on the first rank.

    The line contains the whole message, because messages may differ between ranks. Errors that the
    script catches are not affected.
    """
    if consensus.is_first():
        return
    error.__dict__[_ON_ALL_RANKS] = True
    if getattr(sys.excepthook, _ON_ALL_RANKS, False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if _ON_ALL_RANKS not in value.__dict__:
            previous(kind, value, trace)
        else:
            print(
                f"[ds_ext] rank {dist.get_rank()}: {kind.__name__}: {value} (traceback: rank 0)",
                file=sys.stderr,
            )

    setattr(hook, _ON_ALL_RANKS, True)
    sys.excepthook = hook


# Ops that DeepSpeed compiles on first use.


def announce_build(name: str) -> None:
    """Logs that DeepSpeed is about to compile an op, or warns that a stale lock blocks the build.

    Before torch 2.15, the existence of a file locks a build (``FileBaton``). A killed build leaves
    the file behind, and every later run waits forever without a message. Newer versions lock the
    file itself (``FileLock``), so a leftover file does not block.

    Args:
        name: the name of the op.
    """
    folder = Path(cpp_extension._get_build_directory(name, False))
    lock = folder / "lock"
    waits = hasattr(cpp_extension, "FileBaton") and lock.exists()
    if waits and not _is_open(lock):
        warn(
            f"DeepSpeed's op {name} is waiting for a build lock, but no process on this machine is "
            "building it (a build was probably killed). If no other machine is building it, delete "
            f"{lock}"
        )
    elif not (folder / f"{name}.so").exists():
        log(f"DeepSpeed builds its op {name}, once for this machine: it may take minutes")


def _is_open(path: Path) -> bool:
    """Whether a visible process on this machine has the file open, or the file no longer exists."""
    file = os.path.realpath(path)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.path.realpath(fd) == file for fd in (process / "fd").iterdir()):
                return True
        except OSError:  # the process has ended, or belongs to another user
            continue
    return not path.exists()
