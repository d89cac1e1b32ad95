"""A rank's run of a tensor, the whole that all ranks have of it, and DeepSpeed's padded partition.

With tensor parallelism the whole is what a rank holds of the matrix, as in DeepSpeed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.distributed.layout import Layout
from ds_ext.distributed.lost import explained
from ds_ext.distributed.placement import as_bytes
from ds_ext.engine.autotp import unpartitioned_shape


class Wholes:
    """Makes wholes and partitions of a layout's runs, and the reverse.

    ``gather`` and ``assemble`` are collectives of the ranks that share a parameter.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def gather(self, param: Tensor, run: Tensor) -> Tensor:
        """Returns the whole, in the parameter's shape, of which ``run``, [len(shard)], is ours."""
        start, numel = self._span(param)
        return self.assemble(param, run, start, numel).view(unpartitioned_shape(param))

    def assemble(self, param: Tensor, run: Tensor, start: int, total: int) -> Tensor:
        """Returns [total] elements of which each rank has a run; runs may overlap.

        Args:
            param: the parameter, whose ranks take part.
            run: this rank's elements, flat.
            start: where they begin.
            total: how many there are.
        """
        placement = self.layout.of[param]
        whole = torch.zeros(total, dtype=run.dtype, device=self.layout.device)
        whole[start : start + len(run)] = run
        if placement.num_shards > 1:
            with explained():
                dist.all_reduce(as_bytes(whole), op=dist.ReduceOp.MAX, group=placement.group)
        return whole

    def cut(self, param: Tensor, value: Tensor) -> Tensor:
        """Returns this rank's run, [len(shard)], of a whole value.

        Raises:
            ValueError: for a value of another size.
        """
        start, numel = self._span(param)
        if value.numel() != numel:
            raise ValueError(
                f"{self.layout.name(param)} has {numel} elements, the value that is to be set has "
                f"{value.numel()}: give all ranks the whole value."
            )
        n = len(self.layout.shard(param))
        return value.detach().reshape(-1)[start : start + n]

    def pad(self, param: Tensor, run: Tensor) -> Tensor:
        """Returns a run with zeros up to the size of a partition, the same on all ranks."""
        return nn.functional.pad(run, (0, self.layout.shard(param).size - len(run)))

    def unpad(self, param: Tensor, value: Tensor) -> Tensor:
        """Returns the run, [len(shard)], of a partition with or without padding.

        Raises:
            ValueError: for a value of another size.
        """
        shard = self.layout.shard(param)
        if value.numel() not in (len(shard), shard.size):
            raise ValueError(
                f"this rank has {len(shard)} elements of {self.layout.name(param)} ({shard.size} "
                f"with padding), the value that is to be set has {value.numel()}."
            )
        return value.detach().reshape(-1)[: len(shard)]

    def _span(self, param: Tensor) -> tuple[int, int]:
        """Where this rank's run starts in what it holds of a parameter; elements of that."""
        held = self.layout.of[param].tensor_parallel_shards.get(param)
        shard = self.layout.shard(param)
        if held is None:
            return shard.start, shard.numel
        return shard.start - held.start, held.numel
