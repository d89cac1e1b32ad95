"""The sizes of the blocks in which torch's operations read a run."""

import torch

from ds_ext.ops.shard import BLOCK

# Elements of a block for matrix products on a GPU, and for their updates: 32 MiB of fp32 fit into
# its cache.
SLICE = 2**23


def product_limit(device: torch.device) -> int:
    """The most elements of a run in one matrix product."""
    return BLOCK if device.type == "cpu" else SLICE
