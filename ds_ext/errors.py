"""Errors that users may want to catch. Invalid settings raise ValueError."""

from collections.abc import Iterable


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or belongs to another run."""


class LostRankError(RuntimeError):
    """Another rank has ended, or exceeded the timeout of the process group."""


def raise_all(problems: Iterable[str]) -> None:
    """Raises ValueError with a line for each problem, if there is one."""
    if lines := "\n".join(problems):
        raise ValueError(lines)
