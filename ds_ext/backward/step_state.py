"""The step in progress: norm, bad gradients, kept gradients, what was stepped; its result."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ext.backward import error_texts
from ds_ext.backward.reduced_grad import GradientReader, ReducedGrad, ReducedGrads
from ds_ext.backward.streams import from_host
from ds_ext.distributed.layout import Layout
from ds_ext.optimizer import RuleOptimizer, update_stats
from ds_ext.optimizer.nonfinite import GradFlags
from ds_ext.optimizer.update_stats import UpdateStats


@dataclass
class Clipping:
    """Computes the factor by which gradients are scaled so that their norm is at most ``max_norm``.

    In the mode "exact" from the norm of the step itself; in the mode "previous" from the norm of
    the step before.
    """

    max_norm: float  # 0: not clipped
    mode: str
    previous_norm: float | None = None  # the last one that was finite

    @property
    def needs_norm(self) -> bool:
        """Whether the norm has to be known before the first gradient is used."""
        return bool(self.max_norm) and (self.mode == "exact" or self.previous_norm is None)

    def coefficient(self, norm: float | None) -> float:
        """Returns min(1, max_norm / (norm + 1e-6)), torch's formula; 1 if no norm is known."""
        if not self.max_norm or norm is None:
            return 1.0
        return min(1.0, self.max_norm / (norm + 1e-6))


@dataclass
class StepState:
    """The state of one step. ``FusedBackward`` makes it when a step begins, and drops it whole."""

    reader: GradientReader
    kept: dict[Tensor, ReducedGrad] = field(default_factory=dict)  # until the step
    # Parameters, and the sums of squares of their mean gradients on this rank, [n].
    squares: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)
    norm: float | None = None  # over all ranks, once it is known
    coefficient: float = 1.0  # by which gradients are clipped
    must_keep: bool = False  # whether gradients wait for the step, whatever the policy
    is_norm_read: bool = False  # whether clip_grad_norm_ has returned the norm of this step
    is_measured: bool = False  # whether the norm of the next backward pass was measured
    rules: list[Any] = field(default_factory=list)  # of the groups, when backward began to step
    used_up: set[Tensor] = field(default_factory=set)  # parameters whose gradient was taken
    stepped: int = 0  # number of parameters
    bad: list[str] = field(default_factory=list)  # names of the parameters of bad gradients
    flags: GradFlags = field(default_factory=GradFlags)  # what passes have found since a read
    flagged_square: float = 0.0  # over all ranks, of gradients that passes have checked

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has come."""
        return not self.squares and not self.flags.checked and not self.flagged_square

    def drop(self, params: Iterable[Tensor]) -> None:
        """Drops kept gradients."""
        for param in params:
            self.kept.pop(param, None)

    def replace(self, param: Tensor, run: Tensor) -> None:
        """Overwrites a kept gradient by ``run``, [len(shard)], which may be not finite."""
        g = self.kept[param].g
        g[: len(run)].copy_(run)
        self.kept[param] = ReducedGrad(g)

    def use_up(self, params: Collection[Tensor]) -> None:
        """Records that the gradients of ``params`` were taken.

        Raises:
            RuntimeError: a parameter has a second gradient; raised on all ranks alike.
        """
        again = self.used_up.intersection(params)
        if again:
            raise self.second_gradient(again.pop())
        self.used_up.update(params)

    def second_gradient(self, param: Tensor) -> RuntimeError:
        """Returns the error for a second gradient of a parameter."""
        names = self.reader.grad_config.setting_names
        name = self.reader.layout.name(param)
        return RuntimeError(error_texts.SECOND_GRADIENT.format(param=name, names=names))

    def record(self, grads: ReducedGrads) -> None:
        """Adds gradients to the norm."""
        self.squares += self._squares(grads)
        if not grads:  # on this rank; others may have some
            nothing = torch.zeros(0, dtype=torch.float64, device=self.reader.layout.device)
            self.squares.append(([], nothing))

    def _squares(self, grads: ReducedGrads) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yields the parameters of each placement, and this rank's share of their squares, [n]."""
        reader, layout = self.reader, self.reader.layout
        for placement, params in layout.by_placement(grads):
            share = reader.unscale(placement) ** 2 / layout.num_replicas[placement]
            yield params, reader.squares([(p, grads[p]) for p in params]) * share

    def _flag(self, names: Iterable[str]) -> None:
        """Records parameters with bad gradients, each once."""
        self.bad = [*dict.fromkeys((*self.bad, *names))]

    def find_bad(self, grads: ReducedGrads) -> set[Tensor]:
        """Reads the votes on gradients that the host reads; returns parameters of bad gradients."""
        votes = {p: grad.bad for p, grad in grads.items() if grad.bad is not None}
        if not votes:
            return set()
        is_bad = torch.stack(list(votes.values())).tolist()
        found = {param for param, bad in zip(votes, is_bad, strict=True) if bad}
        self._flag(map(self.reader.layout.name, found))
        return found

    def reduce_norm(self, clipping: Clipping) -> None:
        """Computes the norm over all ranks and the clip coefficient, and finds bad gradients.

        One message adds up the sums of squares of all parameters.
        """
        if not self.squares:
            return
        layout = self.reader.layout
        own = torch.zeros(len(layout.weights), dtype=torch.float64, device=layout.device)
        numbers = [layout.index_of[p] for params, _ in self.squares for p in params]
        at = from_host(numbers, torch.int64, layout.device)
        own.index_add_(0, at, torch.cat([squares for _, squares in self.squares]))
        totals = layout.total(own).cpu()
        self.norm = float(totals.sum().sqrt())
        self.coefficient = clipping.coefficient(self.norm)
        is_bad = (totals <= self.reader.upper_bounds()).logical_not_()
        self._flag(layout.weights[i].name for i in is_bad.nonzero().flatten().tolist())

    def norm_so_far(self) -> float:
        """Returns the norm of all gradients that have come; all ranks call it."""
        layout = self.reader.layout
        self.is_norm_read = True
        if self.norm is not None and not self.kept:
            return self.norm
        square = self._sum(self._squares(self.kept) if self.kept else self.squares)
        flagged = 0.0 if self.kept else self.flagged_square
        return math.sqrt(layout.total(square).item() + flagged)

    def _sum(self, squares: Iterable[tuple[list[Tensor], Tensor]]) -> Tensor:
        """The sum of sums of squares, []."""
        zero = torch.zeros((), dtype=torch.float64, device=self.reader.layout.device)
        return sum((x.sum() for _, x in squares), zero)

    def end(self) -> list[Tensor]:
        """Synchronizes with the device and computes the norm over all ranks; all ranks call it.

        Returns:
            Parameters that passes have skipped.
        """
        wanted = []
        if self.norm is None and self.squares:
            wanted = [self.reader.layout.total(self._sum(self.squares))]
        skipped, square = self.read_flags(wanted)
        if self.norm is None:
            square += self.flagged_square
            self.norm = math.inf if math.isnan(square) else math.sqrt(square)
        return skipped

    def read_flags(self, squares: Sequence[Tensor] = ()) -> tuple[list[Tensor], float]:
        """Synchronizes with the device; returns what passes have skipped, and Σ ``squares``.

        The sums of squares that passes check contain ``coefficient``: rules read clipped gradients.
        """
        flags, self.flags = self.flags, GradFlags()
        if not flags.checked:
            return [], sum(map(Tensor.item, squares))
        bad, square, numbers = flags.read(*squares)
        if bad:
            self._flag(map(self.reader.layout.name, bad))
        self.stepped -= len(bad)
        self.flagged_square += square / self.coefficient**2
        return bad, sum(numbers)


class StepResult(NamedTuple):
    """How a step ended."""

    norm: float  # of all gradients before clipping; not finite if one of them was not
    overflow: bool  # whether a gradient was bad: not finite, or too large
    skipped: bool  # whether no parameter was stepped because of that


def collect_metrics(
    state: StepState, optimizer: RuleOptimizer, layout: Layout, skipped_steps: int
) -> dict[str, float]:
    """Returns the metrics of a step whose norm is known; all ranks call it.

    Clears the optimizer's update statistics, and the layout's count of bytes sent.
    """
    assert state.norm is not None
    stats = optimizer.update_stats
    sizes = {} if stats is None else _sizes(optimizer, stats, layout)
    return {
        "grad_norm": state.norm,
        "clip_coefficient": state.coefficient,
        "skipped_parameters": len(state.bad),
        "skipped_steps": skipped_steps,
        **sizes,
        "bytes_sent": layout.take_bytes_sent(),
    }


def _sizes(optimizer: RuleOptimizer, stats: UpdateStats, layout: Layout) -> dict[str, float]:
    """The RMS of updates and of weights by parameter group."""
    totals = layout.total(stats.sums().to(layout.device))
    stats.clear()
    groups = optimizer.index.groups
    # A group's own name, with characters of file names, or its position.
    names = [re.sub(r"[^\w.-]+", "_", g.get("name", "")) or str(i) for i, g in enumerate(groups)]
    figures = zip(names, update_stats.rms(totals), strict=True)
    return {f"{key}/{name}": value for name, group in figures for key, value in group.items()}
