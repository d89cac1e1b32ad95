"""Shows log lines and warnings once, not on every rank."""

import logging
from contextlib import AbstractContextManager

from deepspeed.utils import logger as deepspeed_logger

from ds_ext import logs
from ds_ext.distributed import consensus
from ds_ext.distributed.groups import with_attribute


def log(message: str, level: int = logging.INFO) -> None:
    """Writes a line to the logger "ds_ext", on the first rank only."""
    logs.show_by_default()
    if consensus.is_first():
        logs.logger.log(level, message)


def warn(message: str) -> None:
    """Writes a warning to the logger "ds_ext", on the first rank only."""
    log(message, logging.WARNING)


def quiet() -> AbstractContextManager[None]:
    """Context in which DeepSpeed's logger shows only errors."""
    return with_attribute(deepspeed_logger, "level", logging.ERROR)
