"""What is known of the step in progress: the norm, which gradients are bad, what has been used."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_ext.backward import messages
from ds_ext.backward.reading import GradientReader, Runs
from ds_ext.backward.runs import Run
from ds_ext.optimizer.verdict import Told, Verdict


@dataclass
class Clipping:
    """What gradients are multiplied by so that their norm is ``max_norm`` at most.

    Exactly, by the norm of the step itself; or, in the mode "previous", by that of the step before.
    """

    max_norm: float  # 0: not clipped
    mode: str
    previous_norm: float | None = None  # the last one that was finite

    @property
    def needs_norm(self) -> bool:
        """Whether the norm of the step itself has to be known."""
        return bool(self.max_norm) and (self.mode == "exact" or self.previous_norm is None)

    def coefficient(self, norm: float | None) -> float:
        """min(1, max_norm / (norm + 1e-6)), torch's formula; 1 where no norm is known."""
        if not self.max_norm or norm is None:
            return 1.0
        return min(1.0, self.max_norm / (norm + 1e-6))


@dataclass
class Tally:
    """What is known of the step in progress; dropped as a whole when the step ends."""

    reader: GradientReader
    # of the elements of the mean gradient that this rank has, or counts for itself
    square: Tensor | None = None  # []
    beyond: Tensor | None = None  # [2], those outside ± max_value, and all
    squares: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)  # of params, [n] each
    kept: dict[Tensor, Run] = field(default_factory=dict)  # gradients that wait for the step
    norm: float | None = None  # over all ranks, once it is known
    coefficient: float = 1.0  # that gradients are clipped by
    must_keep: bool = False  # gradients until the step, whatever the policy
    is_measured: bool = False  # whether a backward pass has measured what the next one brings
    used_up: set[Tensor] = field(default_factory=set)  # parameters whose gradient was taken
    stepped: int = 0  # parameters
    overflow: bool = False  # whether a gradient was not finite
    bad: list[str] = field(default_factory=list)  # names of the parameters of such gradients
    suspects: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # parameter, is bad []
    told: Told | None = None  # what kernels have found, until it is read
    told_square: float = 0.0  # of gradients that they have judged by sums of squares, on all ranks

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has come."""
        return self.square is None and not self.told and not self.told_square

    def begin_told(self) -> Told:
        """Returns what kernels tell in this step, of as many parameters as the model has."""
        if self.told is None:
            self.told = Told(len(self.reader.layout.names))
        return self.told

    def use_up(self, params: Collection[Tensor]) -> None:
        """Notes that gradients were taken.

        Raises:
            RuntimeError: a parameter has a second gradient; on all ranks alike.
        """
        again = self.used_up.intersection(params)
        if again:
            name = self.reader.layout.name(again.pop())
            raise RuntimeError(f"{name} {messages.second_gradient(self.reader.how.words)}")
        self.used_up.update(params)

    def record(self, runs: Runs) -> None:
        """Adds gradients to the norm, and notes which may not be finite."""
        reader, layout = self.reader, self.reader.layout
        for placement, params in layout.by_placement(runs):
            unscale, replicas = reader.unscale(placement), layout.num_replicas(placement)
            squares = reader.squares({p: runs[p] for p in params}) * (unscale**2 / replicas)
            self.squares.append((params, squares))
            self._add(squares.sum())
            if reader.how.max_value:
                bound = reader.how.max_value / unscale
                counts = [reader.beyond(param, runs[param], bound) for param in params]
                self._add_beyond(torch.stack(counts).sum(0) / replicas)
        if not runs:  # of this rank: others may have some
            zero = torch.zeros(2, dtype=torch.float64, device=layout.device)
            self._add(zero[0])
            if reader.how.max_value:
                self._add_beyond(zero)
        self.suspects += ((p, run.bad) for p, run in runs.items() if run.bad is not None)

    def add(self, verdict: Verdict) -> None:
        """Adds gradients to the norm that their step has judged, and notes those that are bad.

        What rules read is the mean gradient times ``coefficient``.
        """
        if verdict.square is not None:
            square = torch.tensor(verdict.square, dtype=torch.float64, device="cpu")
            self._add(square.div_(self.coefficient**2).to(self.reader.layout.device))
        self.bad += map(self.reader.layout.name, verdict.bad)
        self.overflow |= bool(verdict.bad)

    def _add(self, square: Tensor) -> None:
        self.square = square if self.square is None else self.square + square

    def _add_beyond(self, counts: Tensor) -> None:
        self.beyond = counts if self.beyond is None else self.beyond + counts

    def find_bad(self) -> set[Tensor]:
        """Finds which gradients recorded since the last call are not finite."""
        suspects, self.suspects = self.suspects, []
        if not suspects:
            return set()
        verdicts = torch.stack([bad for _, bad in suspects]).tolist()
        found = {param for (param, _), bad in zip(suspects, verdicts, strict=True) if bad}
        self.bad += map(self.reader.layout.name, found)
        self.overflow |= bool(found)
        return found

    def judge(self, clipping: Clipping) -> None:
        """Finds the norm of all gradients of the step, what to clip them by, and the bad ones.

        Of these the sums of squares tell, which travel together: no rank has judged them before.
        """
        if self.square is None:
            return
        layout = self.reader.layout
        own = torch.zeros(len(layout.weights), dtype=torch.float64, device=layout.device)
        for params, squares in self.squares:
            numbers = [layout.index_of[p] for p in params]
            at = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            own.index_add_(0, at.to(own.device), squares)
        totals = layout.total(own).cpu()
        self.norm = float(totals.sum().sqrt())
        self.coefficient = clipping.coefficient(self.norm)
        is_bad = (totals <= self.reader.most()).logical_not_()
        self.bad += [layout.weights[i].name for i in is_bad.nonzero().flatten().tolist()]
        self.overflow = bool(self.bad)

    def end(self) -> list[Tensor]:
        """Waits for the device, once a step: all ranks call it.

        It tells the 2-norm of the gradients over all ranks, and which of them kernels have found
        to be bad.

        Returns:
            Parameters that kernels have left as they were.
        """
        wanted = []
        if self.norm is None and self.square is not None:
            wanted = [self.reader.layout.total(self.square)]
        left, square = self._read(wanted)
        if self.norm is None:
            self.norm = math.sqrt(square + self.told_square)
        return left

    def left_alone(self) -> list[Tensor]:
        """Waits for the device -> parameters that kernels have left as they were."""
        return self._read([])[0]

    def _read(self, squares: list[Tensor]) -> tuple[list[Tensor], float]:
        """What kernels have left alone, once they have told; the sum of given squares."""
        told, self.told = self.told, None
        if not told:
            return [], sum(x.item() for x in squares)
        found, numbers = told.read(*squares)
        self.bad += map(self.reader.layout.name, found.bad)
        self.overflow |= bool(found.bad)
        self.stepped -= len(found.bad)
        self.told_square += found.square / self.coefficient**2
        return found.bad, sum(numbers)

    def clipped_fraction(self) -> float:
        """Elements that were bounded, of all; or 1 where gradients were scaled, else 0."""
        if self.beyond is None:
            return float(self.coefficient < 1)
        beyond, elements = self.reader.layout.total(self.beyond).tolist()
        return float(beyond / elements)
