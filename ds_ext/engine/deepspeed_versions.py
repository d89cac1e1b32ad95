"""The supported versions of DeepSpeed."""

import deepspeed

from ds_ext.contract import numbers, written

INSTALLED: str = deepspeed.__version__
LOWEST = (0, 18, 6)  # the oldest version that `make test-all` tests

# Before 0.19.8 DeepSpeed waited only for the last of several collectives.
WAITS_FOR_ALL = numbers(INSTALLED) >= (0, 19, 8)


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


def refuse_old_pipelines(version: str = INSTALLED) -> None:
    """Checks that a version of DeepSpeed computes the gradients of a pipeline correctly.

    Before 0.19.4, each stage divides the next stage's gradients by gradient_accumulation_steps
    again.

    Raises:
        ValueError: the version is older.
    """
    if numbers(version) < (0, 19, 4):
        raise ValueError(
            f"PipelineModule: DeepSpeed {version} scales gradients once at each stage; install "
            "0.19.4 or newer."
        )
