"""The supported versions of DeepSpeed."""

import deepspeed

from ds_ext.versions import numbers, written

INSTALLED: str = deepspeed.__version__
LOWEST = (0, 18, 6)  # the oldest version that `make test-all` tests
NEXT = (0, 20)  # the first version that is not tested yet

# Before 0.19.8 DeepSpeed waited only for the last of several collectives.
WAITS_FOR_ALL = numbers(INSTALLED) >= (0, 19, 8)


def check(version: str = INSTALLED) -> None:
    """Checks that ds_ext supports a version of DeepSpeed, the installed one by default.

    Raises:
        ImportError: in one sentence, if it does not.
    """
    if not LOWEST <= numbers(version) < NEXT:
        lowest, next_ = written(LOWEST), written(NEXT)
        raise ImportError(
            f"ds_ext works with DeepSpeed {lowest} and newer, below {next_}, and {version} is "
            f'installed: pip install "deepspeed>={lowest},<{next_}", or do without DeepSpeed by '
            "ds_ext.fuse_into_backward in plain PyTorch."
        )


def refuse_old_pipelines(version: str = INSTALLED) -> None:
    """Checks that a version of DeepSpeed computes the gradients of a pipeline correctly.

    Before 0.19.4 each stage divided the gradients of the next stage by gradient_accumulation_steps
    once more.

    Raises:
        ValueError: if it does not.
    """
    if numbers(version) < (0, 19, 4):
        raise ValueError(
            f"PipelineModule: DeepSpeed {version} scales gradients once at each stage; install "
            "0.19.4 or newer."
        )
