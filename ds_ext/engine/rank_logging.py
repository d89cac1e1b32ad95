"""Shows log lines, warnings and tracebacks once, not on every rank."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger

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


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which DeepSpeed's logger shows only errors."""
    level, deepspeed_logger.level = deepspeed_logger.level, logging.ERROR
    try:
        yield
    finally:
        deepspeed_logger.level = level


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
    script catches, and errors from code of the user, which may be on one rank only, are not
    affected.
    """
    if consensus.is_first() or not _is_known(error.__traceback__):
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


def _is_known(trace: TracebackType | None) -> bool:
    """Whether ds_ext or DeepSpeed raised an error, as they do on all ranks."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("ds_ext", "deepspeed")
