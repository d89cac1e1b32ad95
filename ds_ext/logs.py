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


def show(message: str) -> None:
    """Logs a line of level INFO that the user sees whatever the application has configured.

    Programs such as axolotl configure the root logger for warnings alone, or filter the lines of
    others. Where no handler would write the line, it goes to stderr. Only a level that was set on
    the logger "ds_ext" itself keeps it back.
    """
    show_by_default()
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, (), None)
    passes = logger.isEnabledFor(logging.INFO) and logger.filter(record)
    if passes and any(_writes(handler, record) for handler in _handlers()):
        logger.handle(record)
    elif logger.level <= logging.INFO:
        print(f"[ds_ext] {message}", file=sys.stderr, flush=True)


def _writes(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Whether a handler would write a line."""
    if isinstance(handler, logging.NullHandler):
        return False
    if isinstance(handler, _LastResort):
        return not _is_configured()
    return record.levelno >= handler.level and bool(handler.filter(record))


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
