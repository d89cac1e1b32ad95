"""Errors that users may want to catch. Invalid settings raise ValueError."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or belongs to another run."""


class LostRankError(RuntimeError):
    """Another rank has ended, or exceeded the timeout of the process group."""
