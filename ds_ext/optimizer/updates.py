"""Runs to step: this rank's run of a weight and its gradient, moved to one device."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ext.ops.executors.flat_sums import square_sums_of
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import NestedState
from ds_ext.optimizer import host_offload
from ds_ext.optimizer.host_offload import HostOffload


class RunUpdate(NamedTuple):
    """One rank's part in the step of one parameter."""

    param: Tensor  # the key of its state and group
    p: Tensor  # this rank's run of the weight, [len(shard)], updated in place
    g: Any  # the same run of the gradient, or ProjectedGrads
    shard: Shard  # which elements of the whole parameter the run is
    num_replicas: int = 1  # ranks with equal runs, whose sums ``Layout.total`` adds


@dataclass
class ProjectedGrads:
    """The sums of a parameter's gradients, as its rule has projected them.

    One for each matrix: a parameter has one, a stack has one for each expert.
    """

    numel_of_run: int
    state: NestedState  # of the parameter, with its projection
    param_dtype: torch.dtype
    parts: dict[int, Any] = field(default_factory=dict)  # by expert; ``values`` is a tensor [n]

    @property
    def values(self) -> list[Tensor]:
        """The kept numbers, [n] of each part."""
        return [part.values for part in self.parts.values()]

    @property
    def device(self) -> torch.device:
        """The device of the gradient."""
        return self.values[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradient."""
        return self.values[0].dtype

    def numel(self) -> int:
        """Returns the number of elements in the run of the gradient."""
        return self.numel_of_run

    def square(self) -> Tensor:
        """Returns the sum of squares of this rank's part, []."""
        return square_sums_of(self.values).sum()

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replaces the kept numbers by ``move`` of them."""
        for part in self.parts.values():
            part.values = move(part.values)

    def scaled_(self, factor: float) -> "ProjectedGrads":
        """Multiplies the kept numbers by a factor in place."""
        if factor != 1:
            for values in self.values:
                values.mul_(factor)
        return self


class StagedBucket:
    """The runs of a bucket and their states, on the device of the gradients.

    If ZeRO's offload stores them elsewhere, they are copies until ``write_back``.

    Args:
        stored: the runs, whose gradients are on one device.
        stored_states: their states.
        offload: stores the states; None: they are on the device of their run.

    Attributes:
        updates: the runs on that device.
        states: their states there.
    """

    def __init__(
        self,
        stored: Sequence[RunUpdate],
        stored_states: Sequence[NestedState],
        offload: HostOffload | None,
    ) -> None:
        self.stored, self.stored_states, self.offload = stored, stored_states, offload
        self.updates, self.states = stored, stored_states
        if not stored:
            return
        device = stored[0].g.device
        if offload is not None:
            self.states = [host_offload.state_to_device(s, device) for s in stored_states]
        if any(u.p.device != device for u in stored):
            self.updates = [u._replace(p=host_offload.to_device(u.p, device)) for u in stored]

    def write_back(self, unchanged: Container[Tensor]) -> None:
        """Copies weights and states to where they are stored, except of ``unchanged`` params."""
        if self.updates is self.stored and self.offload is None:
            return
        runs = zip(self.stored, self.updates, self.stored_states, self.states, strict=True)
        for stored, update, stored_state, state in runs:
            if update.param in unchanged:
                continue
            if update.p is not stored.p:
                stored.p.copy_(update.p, non_blocking=True)
            if self.offload is not None:
                self.offload.store_state(stored_state, state)


def by_device(updates: Iterable[RunUpdate]) -> list[list[RunUpdate]]:
    """Returns the updates divided by the device of their gradients."""
    found: dict[torch.device, list[RunUpdate]] = {}
    for u in updates:
        found.setdefault(u.g.device, []).append(u)
    return list(found.values())
