"""Lines to the user, once and not on every rank."""

from ds_ext import logs
from ds_ext.distributed import consensus


def log(message: str) -> None:
    """Writes a line to the logger "ds_ext", on the first rank alone."""
    logs.show_by_default()
    if consensus.is_first():
        logs.logger.info(message)


def show(message: str) -> None:
    """The same, seen whatever the application has configured: see ``logs.show``."""
    if consensus.is_first():
        logs.show(message)


def warn(message: str) -> None:
    """The same as a warning."""
    logs.show_by_default()
    if consensus.is_first():
        logs.logger.warning(message)
