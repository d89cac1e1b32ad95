"""The devices and parameters that kernels support."""

import functools

import torch

from ds_ext.ops.shard import Shard

DEVICES = {"cuda"}  # the supported device types
MATRICES = 128  # the most matrices of a parameter whose rows and columns kernels add up


def supports(device: torch.device) -> bool:
    """Returns whether kernels support the tensors of a device."""
    return device.type in DEVICES and has_triton()


def supports_matrices(shard: Shard) -> bool:
    """Returns whether kernels support row and column sums of a parameter, and quotients by them.

    Each matrix has its own tiles and sums, so torch's operations are faster for large stacks.
    The answer is the same on all ranks.
    """
    return not shard.is_1x1 and shard.mats <= MATRICES


@functools.cache
def has_triton() -> bool:
    """Returns whether Triton is installed; imports the kernels and Triton."""
    try:
        from ds_ext.ops.executors.triton import kernels  # noqa: F401
    except ImportError:  # a torch without Triton
        return False
    return True
