"""Versions of packages, compared: torch here, DeepSpeed in ``engine``."""

import re

import torch

LOWEST_TORCH = (2, 4)


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, without what a build adds: "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def written(version: tuple[int, ...]) -> str:
    """Returns the version that numbers stand for: (2, 4) -> "2.4"."""
    return ".".join(map(str, version))


def check_torch(version: str) -> None:
    """Checks that torch has what ds_ext uses.

    Raises:
        ImportError: in one sentence, if it is too old.
    """
    if numbers(version) < LOWEST_TORCH:
        raise ImportError(
            f"ds_ext needs torch {written(LOWEST_TORCH)} or newer, and {version} is installed."
        )


check_torch(torch.__version__)
