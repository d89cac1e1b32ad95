"""The errors that a user of ds_ext may want to catch; wrong settings raise ValueError."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or is not of this run."""


class LostRankError(RuntimeError):
    """Another rank has ended, or did not come within the time limit of the process group."""
