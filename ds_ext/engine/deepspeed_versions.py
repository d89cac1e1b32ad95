"""The supported versions of DeepSpeed."""

import deepspeed

from ds_ext.contract import numbers, written

INSTALLED: str = deepspeed.__version__
LOWEST = (0, 19, 8)


def check(version: str = INSTALLED) -> None:
    """Checks that a version of DeepSpeed, by default the installed one, is not too old.

    Raises:
        ImportError: it is too old. The message is one sentence.
    """
    if numbers(version) < LOWEST:
        lowest = written(LOWEST)
        raise ImportError(
            f"ds_ext works with DeepSpeed {lowest} and newer, and {version} is installed: "
            f'pip install "deepspeed>={lowest}", or train without DeepSpeed: call '
            "ds_ext.fuse_into_backward."
        )
