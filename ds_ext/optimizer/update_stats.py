"""RMS of updates and weights by parameter group, measured while weights are written.

``UpdateStats`` wraps runs so that writing a block also measures it. Rules do not see the wrapper,
and no extra pass over memory is needed. Sums are over this rank's runs. The caller adds them up
over ranks, and ``rms`` computes the figures from the totals.
"""

import math
from collections import Counter

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.ops import scratch
from ds_ext.ops.shard import Block, Shard
from ds_ext.ops.weight_storage import StoredWeight
from ds_ext.ops.weight_update import Weight


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

    def wrap(
        self, p: Weight, number: int, group: int, run: Tensor, num_replicas: int = 1
    ) -> ops.Writable:
        """Returns a wrapper of ``p`` that measures it when it is written, once.

        Args:
            p: the weight, as a rule reads and writes it.
            number: of the parameter.
            group: the position of its param group.
            run: the tensor that stores the weight, [n].
            num_replicas: how many ranks measure the same run.
        """
        squares = self.sums_of(number, group, run, num_replicas)
        if isinstance(p, Tensor):
            return MeasuredTensor(p, *squares)
        return MeasuredWeight(p, *squares)

    def sums_of(self, number: int, group: int, run: Tensor, num_replicas: int = 1) -> Tensor:
        """Counts a run; returns the tensor to add squares of its updates and weights to, [2] fp64.

        The arguments are those of ``wrap``.
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

    Args:
        totals: ``UpdateStats.sums`` added up over all ranks, [groups, 3].
    """
    return [
        {"update_rms": math.sqrt(moved / (n or 1)), "weight_rms": math.sqrt(weight / (n or 1))}
        for moved, weight, n in totals.tolist()
    ]


class MeasuredTensor:
    """A tensor that rounds written values to nearest, and measures them."""

    def __init__(self, run: Tensor, moved: Tensor, weight: Tensor) -> None:
        self.run, self.moved, self.weight = run, moved, weight

    def block(self, b: Block) -> Tensor:
        """Returns block ``b`` of the weights, [mats, rows, cols], which may be overwritten."""
        x = ops.read(self.run, b)
        return x.clone() if ops.is_part(x, self.run) else x

    def write_(self, b: Block, new: Tensor) -> None:
        """Overwrites block ``b`` by ``new``, [mats, rows, cols], and measures the change."""
        held = new.to(self.run.dtype).to(new.dtype)
        add_square_(self.moved, held - ops.read(self.run, b))
        add_square_(self.weight, held)
        ops.write_(self.run, b, held)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that weights are stored in."""
        return self.run.dtype

    def addcmul_(self, x: Tensor, y: Tensor, value: float) -> None:
        """Adds ``x`` · ``y`` · ``value``; ``y`` is []. Gives the same bits as Tensor.addcmul_."""
        for b in scratch.blocks(Shard.whole((len(self.run),))):
            old = ops.read(self.run, b).clone()
            self.run[b.run].addcmul_(x[b.run], y, value=value)
            held = ops.read(self.run, b)
            add_square_(self.moved, held - old)
            add_square_(self.weight, held)


class MeasuredWeight:
    """A run in another storage form, such as a master, that measures its new values."""

    def __init__(self, run: StoredWeight, moved: Tensor, weight: Tensor) -> None:
        self.run, self.moved, self.weight = run, moved, weight
        self.last: tuple[Block, Tensor] | None = None

    def block(self, b: Block) -> Tensor:
        """Returns block ``b`` of the weights, [mats, rows, cols] fp32, and remembers it."""
        self.last = b, self.run.block(b)
        return self.last[1].clone()

    def write_(self, b: Block, new: Tensor) -> None:
        """Overwrites block ``b`` by ``new``, [mats, rows, cols], and measures the change."""
        # Rules read a block before they write it. Reading a master twice would be slow.
        old = self.last[1] if self.last and self.last[0] is b else self.run.block(b)
        held = self.run.write_(b, new)
        add_square_(self.moved, held - old)
        add_square_(self.weight, held)


def add_square_(total: Tensor, x: Tensor) -> None:
    """total ← total + sum of x²; in fp32 with a relative error up to 2e-4 if all x are equal."""
    flat = x.reshape(-1)
    total += torch.dot(flat, flat)
