"""The log: lines of the logger "ds_ext", for whatever the application has configured, or stderr."""

import logging
import sys
from collections.abc import Iterator

logger = logging.getLogger("ds_ext")
logger.addHandler(logging.NullHandler())


def show_by_default() -> None:
    """Lets lines of level INFO and above reach stderr where nobody has configured logging.

    Called where training begins, not on import. An application that gives a handler to the logger
    "ds_ext" or to the root gets the lines by that alone, also if it does so later; a level that
    it has set stays.
    """
    if _is_configured():
        return
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        logger.addHandler(_LastResort())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def _is_configured() -> bool:
    """Whether a handler of the application's would get a line."""
    return any(not isinstance(h, (logging.NullHandler, _LastResort)) for h in _handlers())


def _handlers() -> Iterator[logging.Handler]:
    """All handlers that a line is passed to."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from at.handlers
        at = at.parent if at.propagate else None


class _LastResort(logging.Handler):
    """Writes to stderr what no other handler gets."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_configured():
            print(f"[ds_ext] {self.format(record)}", file=sys.stderr, flush=True)
