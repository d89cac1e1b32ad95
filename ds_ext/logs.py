"""The logger "ds_ext". It writes to stderr if the application installs no handlers."""

import functools
import logging
import sys
from collections.abc import Iterator

logger = logging.getLogger("ds_ext")
logger.addHandler(logging.NullHandler())


def show_by_default() -> None:
    """Writes records of level INFO and above to stderr, unless the application configures logging.

    Called when training begins, not on import. If the application adds a handler to the logger
    "ds_ext" or to the root logger, even later, only that handler gets the records. A level that the
    application has set does not change.
    """
    if _is_configured():
        return
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        logger.addHandler(_LastResort())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def show(message: str) -> None:
    """Logs a line of level INFO that the user sees with any logging configuration.

    Programs such as axolotl configure the root logger for warnings only, or filter records of other
    packages. If no handler would write the line, it goes to stderr. Only a higher level of the
    logger "ds_ext" suppresses it.
    """
    show_by_default()
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, (), None)
    passes = logger.isEnabledFor(logging.INFO) and logger.filter(record)
    if passes and any(_writes(handler, record) for handler in _handlers()):
        logger.handle(record)
    elif logger.level <= logging.INFO:
        print(f"[ds_ext] {message}", file=sys.stderr, flush=True)


warn_once = functools.cache(logger.warning)  # the first time that a message comes


@functools.cache
def show_once(message: str) -> None:
    """Logs a line as ``show`` does, but only its first time in this process."""
    show(message)


def _writes(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Whether a handler would write a record."""
    if isinstance(handler, logging.NullHandler):
        return False
    if isinstance(handler, _LastResort):
        return not _is_configured()
    return record.levelno >= handler.level and bool(handler.filter(record))


def _is_configured() -> bool:
    """Whether the application has installed a handler for this logger."""
    return any(not isinstance(h, (logging.NullHandler, _LastResort)) for h in _handlers())


def _handlers() -> Iterator[logging.Handler]:
    """Yields all handlers of this logger and its ancestors."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from at.handlers
        at = at.parent if at.propagate else None


class _LastResort(logging.Handler):
    """Writes records to stderr if there is no other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_configured():
            print(f"[ds_ext] {self.format(record)}", file=sys.stderr, flush=True)
