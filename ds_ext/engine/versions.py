"""Which DeepSpeed is installed, and what an older one lacks that a config may ask for."""

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed

from ds_ext.config.refused import lookup, without_auto
from ds_ext.versions import numbers, written

LOWEST = (0, 18, 6)  # the first that the tests of `make test-all` run with
NEXT = (0, 20)  # the first that nothing is known of


WAITS_FOR_ALL = numbers(deepspeed.__version__) >= (0, 19, 8)


def check(version: str = deepspeed.__version__) -> None:
    """Checks that ds_ext knows a version of DeepSpeed, the installed one by default.

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


def refuse_old_pipelines(version: str = deepspeed.__version__) -> None:
    """Checks that a version of DeepSpeed computes a pipeline's gradients.

    Before 0.19.4 every stage but the last divided those that it got from the next one by
    gradient_accumulation_steps once more.

    Raises:
        ValueError: if it does not.
    """
    if numbers(version) < (0, 19, 4):
        raise ValueError(
            f"PipelineModule: DeepSpeed {version} scales gradients once at each stage; install "
            "0.19.4 or newer."
        )


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


# (key, whether a value asks for it, the first version that has what ds_ext needs of it)
_SINCE: list[tuple[str, Callable[[Any], bool], tuple[int, ...]]] = [
    ("tensor_parallel.autotp_size", _above_one, (0, 19, 8)),
    ("expert_parallel.enabled", bool, (0, 19, 8)),
    ("zero_optimization.zero_hpz_partition_size", _above_one, (0, 19, 8)),
    ("ds_ext.shard_size", bool, (0, 19, 8)),
    ("zero_optimization.zero_quantized_weights", bool, (0, 19, 8)),
    ("managed_gradient_accumulation", lambda value: value is False, (0, 19, 4)),
]


def refuse_lacking(config: dict[str, Any], version: str = deepspeed.__version__) -> None:
    """Checks that a version of DeepSpeed has what a config asks for.

    Args:
        config: a DeepSpeed config.
        version: the installed one by default.

    Raises:
        ValueError: naming the key and the version that has it.
    """
    for problem in lacking(config, version):
        raise ValueError(problem)


def lacking(config: dict[str, Any], version: str = deepspeed.__version__) -> Iterator[str]:
    """Yields what ``refuse_lacking`` raises, of each key."""
    config = without_auto(config)
    for key, is_wanted, since in _SINCE:
        value = lookup(config, key)
        if value is not None and is_wanted(value) and numbers(version) < since:
            yield (
                f"{key} = {value!r} needs DeepSpeed {written(since)} or newer under "
                f"ds_ext, and {version} is installed: upgrade it, or remove the key."
            )
