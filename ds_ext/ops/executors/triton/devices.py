"""The devices and parameters that kernels support."""

import functools
import os

import torch

from ds_ext.ops.shard import Shard

DEVICES = {"cuda"}  # the supported device types
SWITCH = "DS_EXT_KERNELS"  # environment variable: 0 selects the reference executor
LEAST_TRITON = (3, 5)  # comes with torch 2.9; an older one does not compile the kernels
MATRICES = 128  # the most matrices of a parameter whose rows and columns kernels add up


def supports(device: torch.device) -> bool:
    """Returns whether kernels support the tensors of a device."""
    return device.type in DEVICES and are_available()


def supports_matrices(shard: Shard) -> bool:
    """Returns whether kernels support row and column sums of a parameter, and quotients by them.

    Each matrix has its own tiles and sums, so torch's operations are faster for large stacks.
    The answer is the same on all ranks.
    """
    return shard.mats <= MATRICES


@functools.cache
def are_available() -> bool:
    """Returns whether kernels are not disabled and Triton is new enough; imports both."""
    if os.environ.get(SWITCH, "1") == "0":
        return False
    try:
        from ds_ext.ops.executors.triton import kernels
    except ImportError:  # a torch without Triton
        return False
    return kernels.VERSION >= LEAST_TRITON
