"""RMS of updates and weights by parameter group, measured while weights are written.

Batches add up the squares while they write weights. Runs that are stepped alone are compared with
copies from before the step: ``measured``. Sums are over this rank's runs. The caller adds them up
over ranks, and ``rms`` computes the figures from the totals.
"""

import math
from collections import Counter

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed.lockstep import StepGenerator
from ds_ext.ops import sixteen_bit
from ds_ext.ops.shard import Shard
from ds_ext.ops.sixteen_bit import Weight


class UpdateStats:
    """Sums of squares by parameter group, over all weights written since the last ``clear``."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.clear()

    def clear(self) -> None:
        """Resets all sums."""
        # By number of the parameter, position of its group, and number of replicas.
        self.elements: Counter[tuple[int, int, int]] = Counter()
        self.squares: dict[tuple[int, int, torch.device], Tensor] = {}

    def discount(self, number: int) -> None:
        """Removes a parameter's elements from the count, after its step was skipped."""
        for key in [key for key in self.elements if key[0] == number]:
            del self.elements[key]

    def sums_of(self, number: int, group: int, run: Tensor, num_replicas: int = 1) -> Tensor:
        """Counts a run; returns the tensor to add squares of its updates and weights to, [2] fp64.

        ``group`` is the position of its param group; ``num_replicas`` ranks measure the same run,
        [n].
        """
        self.elements[number, group, num_replicas] += run.numel()
        key = group, num_replicas, run.device
        if key not in self.squares:
            self.squares[key] = torch.zeros(2, dtype=torch.float64, device=run.device)
        return self.squares[key]

    def sums(self) -> Tensor:
        """Returns sums of squares of updates and weights, and elements: [groups, 3] fp64.

        On the device of the weights; on the CPU if none was stepped.
        """
        devices = [device for *_, device in self.squares]
        device = devices[0] if devices else torch.device("cpu")
        total = torch.zeros(self.groups, 3, dtype=torch.float64, device=device)
        for (_, group, num_replicas), n in self.elements.items():
            total[group, 2] += n / num_replicas
        for (group, num_replicas, _), squares in self.squares.items():
            total[group, :2] += squares.to(total.device) / num_replicas
        return total


def rms(totals: Tensor) -> list[dict[str, float]]:
    """Returns the root mean squares of each group's updates and weights; 0 for no elements.

    ``totals`` are ``UpdateStats.sums`` added up over all ranks, [groups, 3].
    """
    return [
        {"update_rms": math.sqrt(moved / (n or 1)), "weight_rms": math.sqrt(weight / (n or 1))}
        for moved, weight, n in totals.tolist()
    ]


def measured(step: StepGenerator, p: Weight, squares: Tensor | None, n: int) -> StepGenerator:
    """Yields from a step, and adds squares of its updates and of the new weights to ``squares``.

    Without ``squares``, updates are not measured. The run has n elements.
    """
    if squares is None:
        yield from step
        return
    before = sixteen_bit.changed(p, Tensor.clone)
    yield from step
    for b in Shard.whole((n,)).blocks():
        new, old = (ops.read(x, b).view(-1) for x in (p, before))
        for total, x in zip(squares, (new - old, new), strict=True):
            total += torch.dot(x, x)  # fp32: relative error up to 2e-4 if all x are equal
