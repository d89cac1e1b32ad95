"""Two ranks on two GPUs, with NCCL between them. The comparison is that of ``one_rank``."""

import torch

from benchmarks.gpu import one_rank
from benchmarks.gpu.setting import Rows, Setting, Skip


def rows(on: Setting) -> Rows:
    """Trains on two ranks, each with batches of its own."""
    if not on.is_rehearsal and (there := torch.cuda.device_count()) < 2:
        raise Skip(f"two ranks of NCCL need two GPUs, and {there} is here")
    yield from one_rank.of_ranks(on, 2)
