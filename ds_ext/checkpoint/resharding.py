"""Saves an optimizer's weights, state and groups, and loads them on any number of ranks.

The saved state contains only plain tensors and numbers, keyed by parameter name. Tensors are saved
in pieces (see ``pieces``). Weights with a master are saved in fp32.
"""

import math
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ext import hyperparams
from ds_ext.checkpoint.manifests import VERSION
from ds_ext.checkpoint.pieces import Pieces, piece
from ds_ext.ops import int8
from ds_ext.ops import state as spec
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts, State
from ds_ext.optimizer import RuleOptimizer, host_offload
from ds_ext.optimizer.param_table import of_this_version

# This many ranks save the tensors that are equal on all ranks. Every rank opens all their files to
# load such tensors, and one rank alone would write too long.
WRITERS = 8


class OwnedRun(NamedTuple):
    """A rank's run of a parameter, its position, and the name of the parameter in checkpoints."""

    name: str
    run: Tensor  # of the weight, [len(shard)]; if it is stored in 8 bits, a NaN without memory
    shard: Shard
    shard_index: int = 0  # the index of the run among ``num_shards`` equal parts
    num_shards: int = 1
    # for a part of a stack of experts: the number of its first expert, and the shape of the stack
    experts: tuple[int, tuple[int, ...]] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.experts[1] if self.experts else self.shard.shape

    @property
    def part(self) -> Part:
        """The position of the run in the whole parameter."""
        before = self.experts[0] * math.prod(self.shape[1:]) if self.experts else 0
        run = slice(before + self.shard.start, before + self.shard.stop)
        return Part.of(run, math.prod(self.shape))


def save(optimizer: RuleOptimizer, owned: Mapping[Tensor, OwnedRun]) -> dict[str, Any]:
    """Returns one rank's weights, optimizer state and groups.

    To load them, call ``checks.check``, ``load_state`` and then ``load_weights``.

    Args:
        optimizer: the optimizer.
        owned: this rank's run of each parameter to save, including all of the optimizer's.
    """
    optimizer.follow_groups()
    return {
        "ds_ext": VERSION,
        "optimizer": type(optimizer).__name__,
        "weights": save_weights(optimizer, owned),
        "state": save_state(optimizer, owned),
        "groups": save_groups(optimizer, owned),
    }


# Weights.


def save_weights(optimizer: RuleOptimizer, owned: Mapping[Tensor, OwnedRun]) -> dict[str, Any]:
    """Returns a piece of each weight with its whole shape; in fp32 if the weight has a master."""
    return {
        own.name: piece(
            optimizer.weights(param, _values(param, own), own.shard),
            own.part,
            shape=list(own.shape),
        )
        for param, own in owned.items()
    }


def _values(param: Tensor, own: OwnedRun) -> Tensor:
    """This rank's run of a weight; a copy in the host's memory if it is stored in 8 bits."""
    held = int8.find(param)
    if held is None:
        return own.run
    return int8.decoded(param).view(-1)[own.shard.start - held.start : own.shard.stop - held.start]


@torch.no_grad()
def load_weights(
    pieces: Pieces, optimizer: RuleOptimizer, owned: Mapping[Tensor, OwnedRun]
) -> list[str]:
    """Writes this rank's part of the weights; returns the names of missing weights."""
    missing = []
    for param, own in owned.items():
        if pieces.first("weights", own.name) is None:
            missing.append(own.name)
            continue
        if held := int8.find(param):
            # A run may end inside a group, whose scale needs all its elements.
            stored = slice(held.start, held.start + held.numel)
            values = pieces.read(Part.of(stored, own.part.total), "weights", own.name)
            int8.write(param, values)
            continue
        values = pieces.read(own.part, "weights", own.name)
        optimizer.write_weights(param, own.run, own.shard, values)
    return missing


# The optimizer's state: the step count, and the tensors that a rule keeps for each parameter.


def save_state(optimizer: RuleOptimizer, owned: Mapping[Tensor, OwnedRun]) -> dict[str, Any]:
    """Returns the step count and state pieces of each parameter that was stepped.

    Leaves out parameters that are no longer in a group.
    """
    saved = {}
    for param, own in owned.items():
        if param in optimizer.group_of and (kept := optimizer.state.get(param)):
            writers = min(own.num_shards, WRITERS)
            is_writer = optimizer.number_of[param] % writers == own.shard_index
            parts = spec.saved(optimizer.state_spec(param, own.shard, optimizer.rule_of(param)))
            saved[own.name] = {"step": kept["step"], **_pieces(kept, parts, is_writer)}
    return saved


@torch.no_grad()
def load_state(pieces: Pieces, optimizer: RuleOptimizer, owned: Mapping[Tensor, OwnedRun]) -> None:
    """Replaces hyper-parameters of groups, and this rank's part of the state, by the saved ones.

    Call ``checks.check`` before it, and ``load_weights``, which also sets masters, after it.
    """
    for group, saved in zip(optimizer.param_groups, pieces.saved[0]["groups"], strict=True):
        hypers = {key: value for key, value in saved.items() if key != "params"}
        group.update(of_this_version(hypers, optimizer.hypers_of(group)))
    optimizer.state.clear()
    for param, own in owned.items():
        found = pieces.first("state", own.name)
        if found is not None and param in optimizer.group_of:
            parts = spec.saved(optimizer.state_spec(param, own.shard, optimizer.rule_of(param)))
            state = _read(pieces, parts, own, param.device, optimizer.offload)
            optimizer.state[param] = {**state, "step": found["step"]}


def _pieces(kept: Mapping[str, Any], parts: Parts, is_writer: bool) -> dict[str, Any]:
    """The pieces of a state. One writer saves tensors that are equal on all ranks."""
    saved: dict[str, Any] = {}
    for key, part in parts.items():
        if not isinstance(part, Part):
            saved[key] = _pieces(kept[key], part, is_writer)
        elif is_writer or not part.is_shared:
            saved[key] = piece(kept[key], part)
    return saved


def _read(
    pieces: Pieces,
    parts: Parts,
    own: OwnedRun,
    device: torch.device,
    offload: host_offload.HostOffload | None,
) -> State:
    """This rank's part of a parameter's state, ready for a step."""

    def read(path: tuple[str, ...], part: Part) -> Tensor:
        values = pieces.read(part, "state", own.name, *path)
        values = values.view(part.shape).to(part.dtype_for(own.run.dtype))
        return host_offload.store(values, device, offload)

    return spec.changed(parts, read)


# Param groups: their hyper-parameters, and the names of their parameters.


def save_groups(optimizer: RuleOptimizer, owned: Mapping[Tensor, OwnedRun]) -> list[dict[str, Any]]:
    """Returns the optimizer's groups with names instead of parameters."""
    names = optimizer.names or [
        of_all_ranks(owned[p].name for p in group["params"]) for group in optimizer.param_groups
    ]
    return [
        {**group, "params": some} for group, some in zip(optimizer.param_groups, names, strict=True)
    ]


def changed_hypers(pieces: Pieces, optimizer: RuleOptimizer, scheduled: Set[str]) -> list[str]:
    """Returns which hyper-parameters ``load_state`` will change, except those of schedulers.

    Schedulers note the rate of which they take fractions as "initial_lr" of a group.

    Args:
        pieces: the saved groups.
        optimizer: the optimizer, with the groups of this run.
        scheduled: the hyper-parameters that a scheduler of the engine changes.
    """
    found = []
    for group, saved in zip(optimizer.param_groups, pieces.saved[0]["groups"], strict=True):
        hypers = optimizer.hypers_of(group)
        new = {**group, **of_this_version(saved, hypers)}
        compared = {*hyperparams.names(hypers), "initial_lr"} - scheduled
        compared -= {"lr"} if "initial_lr" in new else set()
        for key in (key for key in group if key in compared):
            if new[key] != group[key]:
                found.append(f"{key} = {new[key]!r} instead of {group[key]!r}")
    return list(dict.fromkeys(found))


def of_all_ranks(names: Iterable[str]) -> list[str]:
    """Returns unique names without the numbers of deepspeed.moe's experts, which differ by rank.

    ``["deepspeed_experts.3.w", "deepspeed_experts.4.w"]`` becomes ``["deepspeed_experts.*.w"]``.
    """
    return list(dict.fromkeys(re.sub(r"(?<=\bdeepspeed_experts\.)\d+", "*", n) for n in names))
