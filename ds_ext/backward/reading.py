"""This rank's runs of gradients as rules are to see them: averaged, unscaled, clipped."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.backward import settings
from ds_ext.backward.runs import Run
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement

Runs: TypeAlias = Mapping[Tensor, Run]


class GradientReader:
    """Reads summed gradients of a scaled loss as the mean gradients of the loss.

    ``loss_scale`` is what the loss was multiplied by before backward.
    """

    def __init__(self, layout: Layout, how: settings.Gradients) -> None:
        self.layout = layout
        self.how = how
        self.loss_scale = 1.0

    def unscale(self, placement: Placement) -> float:
        """What makes a summed gradient of the scaled loss the mean gradient of the loss."""
        return 1 / (self.loss_scale * (placement.grad_divisor if self.how.average else 1))

    def gradient(self, param: Tensor, run: Run, coefficient: float) -> ops.Gradient:
        """A run, [len(shard)], times the clip ``coefficient``, its elements bounded."""
        g = self._own(param, run)
        factor = self.unscale(self.layout.of[param]) * coefficient
        wide = ops.accumulator(param.dtype)
        if wide != ops.accumulator(g.dtype):  # fp64, reduced or kept in fp32
            g = g.to(wide)
        bound = self.how.max_value or None
        return g if factor == 1 and bound is None else ops.Scaled(g, factor, bound)

    def squares(self, runs: Runs) -> Tensor:
        """The sums of the squares of runs as they were summed -> [n] in no particular order."""
        known = [run.square for run in runs.values() if run.square is not None]
        found = [torch.stack(known)] if known else []
        alike: dict[torch.dtype, list[Tensor]] = {}
        for param, run in runs.items():
            if run.square is None:
                alike.setdefault(run.g.dtype, []).append(self._own(param, run))
        found += [ops.square_sums_of(some).to(self.layout.device) for some in alike.values()]
        return torch.cat([x.double() for x in found])

    def beyond(self, param: Tensor, run: Run, bound: float) -> Tensor:
        """How many elements of a run lie outside ± ``bound``, and how many there are -> [2]."""
        shard = self.layout.shard(param)
        g = self._own(param, run)
        beyond = ops.count_beyond(g, bound, shard, g)
        return torch.stack([beyond, torch.full_like(beyond, len(shard))])

    def _own(self, param: Tensor, run: Run) -> Tensor:
        """The run without its padding."""
        return run.g[: len(self.layout.shard(param))]
