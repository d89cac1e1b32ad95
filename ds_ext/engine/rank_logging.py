"""Shows log lines and warnings once, not on every rank."""

import logging

from ds_ext import logs
from ds_ext.distributed import consensus


def log(message: str, level: int = logging.INFO) -> None:
    """Writes a line to the logger "ds_ext", on the first rank only."""
    logs.show_by_default()
    if consensus.is_first():
        logs.logger.log(level, message)


def warn(message: str) -> None:
    """Writes a warning to the logger "ds_ext", on the first rank only."""
    log(message, logging.WARNING)
