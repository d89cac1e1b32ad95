"""An error that all ranks raise alike: the first shows its traceback, the others one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist

from ds_ext.distributed import consensus

_ALIKE = "_ds_ext_alike"  # set on an error that all ranks raise


@contextmanager
def shown_once(kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Errors of these kinds within the context, are shown by ``once``."""
    try:
        yield
    except kinds as error:
        once(error)
        raise


def once(error: BaseException) -> None:
    """Makes an error that ends this process, if it is not the first rank, one line on stderr.

    That line has the whole message, in case another rank's differs after all. An error that the
    script catches is as any other.
    """
    if consensus.is_first():
        return
    error.__dict__[_ALIKE] = True
    if getattr(sys.excepthook, _ALIKE, False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if _ALIKE not in value.__dict__:
            previous(kind, value, trace)
        else:
            print(
                f"[ds_ext] rank {dist.get_rank()}: {kind.__name__}: {value} (traceback: rank 0)",
                file=sys.stderr,
            )

    setattr(hook, _ALIKE, True)
    sys.excepthook = hook
