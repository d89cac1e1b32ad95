"""Runs to step: this rank's run of a weight and its gradient, moved to one device."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ext.ops.shard import Shard
from ds_ext.ops.state import NestedState
from ds_ext.optimizer import host_offload
from ds_ext.optimizer.host_offload import HostOffload


class RunUpdate(NamedTuple):
    """One rank's part in the step of one parameter."""

    param: Tensor  # the key of its state and group
    p: Tensor  # this rank's run of the weight, [len(shard)], updated in place
    g: Any  # the same run of the gradient, or its projection: KeptGrad
    shard: Shard  # which elements of the whole parameter the run is
    num_replicas: int = 1  # ranks with equal runs, whose sums ``Layout.total`` adds


class StagedRun(NamedTuple):
    """A run and its state on the device of the gradient.

    If ZeRO's offload stores them elsewhere, they are copies until ``write_back``.
    """

    stored: RunUpdate
    stored_state: NestedState
    update: RunUpdate
    state: NestedState

    @classmethod
    def of(cls, u: RunUpdate, state: NestedState, offload: HostOffload | None) -> "StagedRun":
        """Returns a run whose weight and state are on the device of its gradient."""
        device = u.g.device
        staged = state if offload is None else host_offload.state_to_device(state, device)
        p = host_offload.to_device(u.p, device)
        return cls(u, state, u if p is u.p else u._replace(p=p), staged)

    def write_back(self, offload: HostOffload | None) -> None:
        """Copies the stepped weight and state to where they are stored."""
        if self.update.p is not self.stored.p:
            self.stored.p.copy_(self.update.p, non_blocking=True)
        if offload is not None:
            offload.store_state(self.stored_state, self.state)


def by_device(updates: Iterable[RunUpdate]) -> list[list[RunUpdate]]:
    """Returns the updates divided by the device of their gradients."""
    found: dict[torch.device, list[RunUpdate]] = {}
    for u in updates:
        found.setdefault(u.g.device, []).append(u)
    return list(found.values())
