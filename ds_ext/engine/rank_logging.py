"""Shows log lines and warnings once, not on every rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.utils import logger as deepspeed_logger

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


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which DeepSpeed's logger shows only errors."""
    level, deepspeed_logger.level = deepspeed_logger.level, logging.ERROR
    try:
        yield
    finally:
        deepspeed_logger.level = level
