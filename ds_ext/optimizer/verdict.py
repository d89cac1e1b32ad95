"""Gradients are judged by the first round of their step, without a pass or a message for it.

A gradient is bad if an element is not finite, or so large that sums of squares may overflow. Where
a rule changes nothing before its first round, the sum of the squares of each run travels in that:
the total tells all ranks, by the same bits, and this rank's part is its share in the norm. Where
the rule has summed these squares over rows anyway, no pass is made for it. Bad gradients are rare:
the step of a batch that has some is dropped and begun anew without them, in one round more.

Passes of kernels read the verdict where it lies, on the device, and leave parameters of bad
gradients as they are: the host does not wait. It is told by ``Told``, once a step.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed.lockstep import Rule, Sums
from ds_ext.ops import scratch
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves, zeros
from ds_ext.ops.triton.memory import Addresses

TRIED_STEPS = (1, 2)  # numbers of the steps that a rule is tried in
# Votes of all ranks: 1 of a good gradient, IS_BAD of a bad one; so many are good at most.
IS_BAD, ARE_GOOD = 2.0**20, 2.0**19
Answers: TypeAlias = dict[tuple[tuple[int, ...], int, torch.dtype], bool]  # by shape and cut


def most(numel: Any, dtype: torch.dtype) -> Any:
    """Returns how large the sum of squares of a gradient of ``numel`` elements may be."""
    return torch.finfo(ops.accumulator(dtype)).max / numel


class Found(NamedTuple):
    """What ``Told`` tells, the same on all ranks."""

    square: float  # of all gradients judged by sums of squares, whole; infinite if one is bad
    bad: list[Tensor]  # parameters that were not stepped


class Told:
    """What kernels have found of the gradients of a step, by which they judged these.

    The host reads it once, when the step ends.

    Args:
        count: how many parameters may be judged.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._values: dict[torch.device, Tensor] = {}
        self._bounds: dict[Tensor, tuple[int, torch.device, float, bool]] = {}

    def __len__(self) -> int:
        return len(self._bounds)

    def places(
        self,
        params: Sequence[Tensor],
        most: NDArray[np.float32],
        is_square: bool,
        device: torch.device,
    ) -> Addresses:
        """Returns where passes are to write what they judge gradients by, [n].

        Args:
            params: of the gradients; experts of a stack have one.
            most: what is good at most, [n].
            is_square: whether they are judged by sums of squares, of which the norm is made.
            device: where they are stepped.
        """
        if device not in self._values:
            self._values[device] = torch.zeros(self.count, dtype=torch.float32, device=device)
        for param, bound in zip(params, most.tolist(), strict=True):
            self._bounds.setdefault(param, (len(self._bounds), device, bound, is_square))
        places = [self._bounds[param][0] for param in params]
        return Addresses(self._values[device], 4 * np.array(places, dtype=np.int64))

    def read(self, *beside: Tensor) -> tuple[Found, list[float]]:
        """Waits for the device -> what it has found, and other numbers [] that are there."""
        devices = list(self._values)
        first = beside[0].device if beside else devices[0]
        parts = [x.view(1) for x in beside] + [self._values[x] for x in devices]
        read = torch.cat([x.to(first, torch.float64) for x in parts]).tolist()
        ends = {device: len(beside) + i * self.count for i, device in enumerate(devices)}
        square, bad = 0.0, []
        for param, (place, device, most, is_square) in self._bounds.items():
            value = read[ends[device] + place]
            is_good = value <= most
            if not is_good:
                bad.append(param)
            if is_square:
                square += value if is_good else math.inf
        return Found(square, bad), read[: len(beside)]


class Verdict:
    """What is said of gradients while they are stepped by.

    Args:
        params: the parameters whose gradients first rounds judge; the same on all ranks.
        votes: those whose passes read votes on their device, [] each: see ``ARE_GOOD``.
        told: is to tell of gradients that are judged on a device.

    Attributes:
        square: this rank's part of the sum of the squares of gradients that first rounds judge on
            the host, as rules read them; infinite where one is bad on any rank, None if it judges
            none.
        bad: parameters that the host knows were not stepped, the same on all ranks.
    """

    def __init__(
        self,
        params: Set[Tensor] = frozenset(),
        votes: Mapping[Tensor, Tensor] | None = None,
        told: Told | None = None,
    ) -> None:
        self.params, self.votes, self.told = params, votes or {}, told
        self.square: float | None = None
        self.bad: dict[Tensor, None] = {}


class Step(Protocol):
    """The step of some parameters by one generator, which can be begun more than once."""

    params: list[Tensor]

    def begin(self) -> Rule:
        """Returns the generator of partial sums."""
        ...

    def squares(self) -> Tensor:
        """Returns the sums of the squares of this rank's runs of gradients, [n]."""
        ...

    def most(self) -> NDArray[np.float32] | float:
        """Returns what their totals may be, [n]."""
        ...

    def drop(self, good: NDArray[np.bool_]) -> bool:
        """Leaves parameters as they were before the step, but for some -> whether some remain."""
        ...


def judged(step: Step, verdict: Verdict) -> Rule:
    """Runs a step by those gradients that its first round does not show to be bad."""
    rule = step.begin()
    sums = next(rule)
    own = step.squares()
    *totals, found = yield (*sums, own)
    good = found.numpy() <= step.most()
    if good.all():
        verdict.square = (verdict.square or 0.0) + float(own.numpy().sum(dtype=np.float64))
    else:
        verdict.square = math.inf
        rule.close()
        verdict.bad |= {p: None for p, fine in zip(step.params, good, strict=True) if not fine}
        if not step.drop(good):
            return
        rule = step.begin()
        totals = list((yield next(rule)))
    yield from _resumed(rule, tuple(totals))


def _resumed(rule: Rule, totals: Sums) -> Rule:
    """The rest of a generator that waits for ``totals``."""
    while True:
        try:
            sums = rule.send(totals)
        except StopIteration:
            return
        totals = yield sums


class Trials:
    """Tells of each parameter whether its rule changes nothing before its first round."""

    _found: ClassVar[dict[object, Answers]] = {}  # by structures of rules

    def __init__(self) -> None:
        self._of_group: dict[int, tuple[Any, Answers]] = {}

    def renew(self, rules: Mapping[int, Any]) -> None:
        """Takes up the rules that groups have now, by their numbers."""
        for row, rule in rules.items():
            known = self._of_group.get(row)
            if known is None or known[0] is not rule:
                self._of_group[row] = rule, self._found.setdefault(_structure(rule), {})

    def comes_first(self, row: int, shard: Shard, dtype: torch.dtype) -> bool:
        """Returns whether a rule's first round comes before any change; the same on all ranks.

        Args:
            row: number of the rule's group, which ``renew`` was told of.
            shard: the run that it steps; one that tensor parallelism or a stack of experts has
                not cut.
            dtype: of weights and gradients.
        """
        rule, answers = self._of_group[row]
        key = shard.shape, shard.size, dtype
        if key not in answers:
            answers[key] = all(_comes_first(rule, _short(shard), dtype, t) for t in TRIED_STEPS)
        return answers[key]


def _structure(rule: Any) -> object:
    """What of a rule its course depends on: all but the values of real numbers other than 0."""
    return type(rule), tuple(_kind(getattr(rule, f.name)) for f in fields(rule))


def _kind(value: Any) -> object:
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    return ("real", value != 0) if isinstance(value, float) else value


def _comes_first(rule: Any, shard: Shard, dtype: torch.dtype, t: int) -> bool:
    """Whether a step that has reached its first round has written to nothing, as versions tell."""
    p, g = (torch.zeros(len(shard), dtype=dtype, device="cpu") for _ in range(2))
    parts = rule.keeps(shard)
    state = zeros(parts, p)
    tensors = [p, g, *(_at(state, path) for path, _ in leaves(parts))]
    before = [x._version for x in tensors]
    sums = next(rule.step(p, g, state, t, shard), ())
    scratch.clear()  # of the host, where nothing may be stepped
    return bool(sums) and before == [x._version for x in tensors]


def _short(shard: Shard) -> Shard:
    """A run of a row, or less, of the same parameter cut alike: no rank's course depends on it."""
    return replace(shard, start=0, stop=min(shard.cols, shard.size, shard.numel))


def _at(state: Any, path: Sequence[str]) -> Tensor:
    for key in path:
        state = state[key]
    assert isinstance(state, Tensor)
    return state
