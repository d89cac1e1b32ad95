"""Compares package versions, and checks the version of torch."""

import re

import torch

LOWEST_TORCH = (2, 6)


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without its build tag: "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def written(version: tuple[int, ...]) -> str:
    """Returns a version as text: (2, 6) -> "2.6"."""
    return ".".join(map(str, version))


def check_torch(version: str) -> None:
    """Checks the version of torch.

    Raises:
        ImportError: the version is too old. The message is one sentence.
    """
    if numbers(version) < LOWEST_TORCH:
        raise ImportError(
            f"ds_ext needs torch {written(LOWEST_TORCH)} or newer, and {version} is installed."
        )


check_torch(torch.__version__)
