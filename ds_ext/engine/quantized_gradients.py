"""ZeRO++ quantized gradients (qgZ): sums the gradients of matrices over hosts in 4 bits.

DeepSpeed's implementation needs CUDA kernels, reads gradients of any dtype as fp16, and falls back
to a plain reduce-scatter for indivisible sizes. This implementation uses torch operations.
"""

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from ds_ext.distributed.groups import Group, size_of
from ds_ext.distributed.int4_reduce_scatter import BLOCK_SIZE, Int4ReduceScatter
from ds_ext.distributed.placement import Placement
from ds_ext.engine import engine_settings
from ds_ext.engine.parameters import deepspeed_parameter
from ds_ext.engine.rank_logging import log
from ds_ext.engine.zero3 import Zero3Placement

KEY = "zero_optimization.zero_quantized_gradients"
# Measured by tests/unit/test_four_bits.py.
WHAT_IT_COSTS = (
    "rounding changes a sum by about 16 % of its norm if its elements are normally distributed "
    "and differ between ranks"
)


class FourBitPlacement(Zero3Placement):
    """The placement of ZeRO-3 parameters whose gradients are summed in 4 bits.

    Args:
        group: the ranks.
        grad_divisor: see ``Placement``.
        host_size: the number of ranks on a host.
    """

    def __init__(self, group: Group, grad_divisor: int, host_size: int) -> None:
        super().__init__(group, grad_divisor)
        self.reduce_scatter = Int4ReduceScatter(group, host_size)

    @property
    def groups(self) -> set[Group]:
        """The groups that this placement uses for collectives."""
        return super().groups | {self.reduce_scatter.inside, self.reduce_scatter.across}

    def _begin_sum(self, flats: list[Tensor]) -> dist.Work:
        return self.reduce_scatter.begin(flats, list(map(self._own_part, flats)))

    def _bytes_of_sum(self, flats: Sequence[Tensor]) -> int:
        return self.reduce_scatter.num_bytes(list(map(self._own_part, flats)))


def placements(
    group: Group, grad_divisor: int, names: Mapping[Tensor, str]
) -> Callable[[Tensor], Placement]:
    """Returns a function from a parameter to its placement, with quantized gradients.

    Args:
        group: the data-parallel ranks. Ranks of a host must be consecutive.
        grad_divisor: see ``Placement``.
        names: the names of all parameters.

    Raises:
        ValueError: the number of ranks per host is unknown, is 1, or does not divide all ranks.
    """
    exact, size, ranks = (
        Zero3Placement(group, grad_divisor),
        engine_settings.ranks_per_host(KEY, True),
        size_of(group),
    )
    if ranks <= size:
        log(f"{KEY}: gradients are summed exactly, because all {ranks} ranks are on one host")
        return lambda param: exact
    if size == 1 or ranks % size:
        raise ValueError(
            f"{KEY} = True needs the same number of ranks, at least 2, on each host. This host has "
            f"{size} of the {ranks} ranks: change the launch, or remove the setting."
        )
    rounded = FourBitPlacement(group, grad_divisor, size)
    matrices = {p for p in names if _is_rounded(p, ranks)}
    log(
        f"{KEY}: gradients of {len(matrices)} of {len(names)} parameters are summed in 4 bits, "
        f"inside hosts of {size} ranks and then across; {WHAT_IT_COSTS}"
    )
    return lambda param: rounded if param in matrices else exact


def _is_rounded(param: Tensor, ranks: int) -> bool:
    """Whether a gradient is quantized. As in DeepSpeed, vectors and small matrices are not."""
    shape = deepspeed_parameter(param).ds_shape
    return len(shape) > 1 and shape.numel() >= BLOCK_SIZE * ranks
