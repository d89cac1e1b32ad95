"""What kernels take: devices, and parameters that they step in batches."""

import functools

import torch

from ds_ext.ops.shard import Shard

DEVICES = {"cuda"}  # whose tensors kernels take
MATRICES = 128  # of a parameter, at most, whose rows and columns kernels add up


def take(device: torch.device) -> bool:
    """Returns whether kernels take the tensors of a device."""
    return device.type in DEVICES and are_there()


def take_matrices(shard: Shard) -> bool:
    """Returns whether kernels add up rows and columns of a parameter, and divide by such sums.

    Each matrix has tiles and sums of its own: torch's operations are faster for large stacks.
    The answer is the same on all ranks.
    """
    return not shard.is_1x1 and shard.mats <= MATRICES


@functools.cache
def are_there() -> bool:
    """Returns whether Triton is installed; imports the kernels, which takes Triton with them."""
    try:
        from ds_ext.ops.executors.triton import kernels  # noqa: F401
    except ImportError:  # a torch without Triton
        return False
    return True
