"""RMS of updates and weights by parameter group, from copies of the weights before their step.

Sums are over this rank's runs. The caller adds them up over ranks, and ``rms`` computes the figures
from the totals.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.ops.expressions import WeightStorage, accumulator, storage_of
from ds_ext.ops.functions import Geometry
from ds_ext.ops.runs import Runs

Key = tuple[int, int, int]  # number of a parameter, position of its group, ranks with the same run


class UpdateStats:
    """Sums of squares by parameter group, over all weights stepped since the last ``clear``."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.clear()

    def clear(self) -> None:
        """Resets all sums."""
        self.totals: dict[Key, Tensor] = {}  # of each parameter, [3] fp64 as in ``sums``

    def discount(self, number: int) -> None:
        """Removes a parameter's sums, after its step was skipped."""
        self.totals = {key: total for key, total in self.totals.items() if key[0] != number}

    def begin(self, p: Any, shard: Geometry, keys: Sequence[Key]) -> Callable[[], None]:
        """Copies a run of weights, or those of a batch, before their step.

        Returns:
            A function to call after the step, which adds the squares. ``keys`` has a key for each
            run.
        """
        stored = cast(WeightStorage, storage_of(p)).run
        runs = stored.tensors if isinstance(stored, Runs) else [stored]
        copies = [torch.zeros_like(run, dtype=accumulator(run.dtype)) for run in runs]
        before: Any = Runs(copies) if isinstance(stored, Runs) else copies[0]
        ops.lerp_(before, p, 1.0, shard)  # exact from 0

        def end() -> None:
            squares = ops.square_sums((ops.plus(before, p, -1.0), p), shard, copies[0])
            for key, run, own in zip(keys, runs, torch.stack(squares, -1).view(-1, 2), strict=True):
                zeros = torch.zeros(3, dtype=torch.float64, device=run.device)
                total = self.totals.setdefault(key, zeros)
                total[:2] += own
                total[2] += len(run)

        return end

    def sums(self) -> Tensor:
        """Returns sums of squares of updates and weights, and elements: [groups, 3] fp64.

        On the device of the weights; on the CPU if none was stepped.
        """
        if not self.totals:
            return torch.zeros(self.groups, 3, dtype=torch.float64, device="cpu")
        found = [total / num_replicas for (*_, num_replicas), total in self.totals.items()]
        device = found[0].device
        total = found[0].new_zeros(self.groups, 3)
        for (_, group, _), own in zip(self.totals, found, strict=True):
            total[group] += own.to(device)
        return total


def rms(totals: Tensor) -> list[dict[str, float]]:
    """Returns the root mean squares of each group's updates and weights; 0 for no elements.

    ``totals`` are ``UpdateStats.sums`` added up over all ranks, [groups, 3].
    """
    return [
        {"update_rms": math.sqrt(moved / (n or 1)), "weight_rms": math.sqrt(weight / (n or 1))}
        for moved, weight, n in totals.tolist()
    ]
