"""Explains errors of lost connections to other ranks."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist

from ds_ext.errors import LostRankError

# Signs that a peer has ended or is late: words in gloo's errors; NCCL raises DistError.
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket (closed|timeout)|"
    r"remote (process|peer) (exited|closed)|failed to (recv|connect)|no route to host",
    re.IGNORECASE,
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A context that replaces errors of lost connections by LostRankError, which explains them."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        raise LostRankError(
            "another rank has ended, or did not respond within the time limit of the process group "
            "(deepspeed.init_distributed(timeout=...)). The first error in the other ranks' output "
            "shows the cause. Saved checkpoints are unchanged: restart from the newest complete "
            f"one. The error of the connection: {str(error).partition(chr(10))[0]}"
        ) from error


def wait_for(waits: Iterable[Callable[[], object]]) -> Callable[[], None]:
    """Returns a function that runs the waits of collectives, with ``explained`` errors."""

    def wait_for_all() -> None:
        with explained():
            for wait in waits:
                wait()

    return wait_for_all
