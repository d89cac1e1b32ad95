"""What a rank saves of a run, and how any number of ranks put it together again.

Everything is plain tensors and numbers under parameters' names. A tensor is saved as a piece,
``{"start", "total", "values"}``: elements [start, start + len) of the ``total`` that all ranks
keep of it, flattened. A rank that loads reads what it needs of it from whoever saved it, so the
number of ranks and the ZeRO stage may change. Weights with a master are saved in fp32.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ext import host_offload, hyperparams, ops
from ds_ext.checkpoint.folder import VERSION
from ds_ext.errors import CheckpointError
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts, State, leaves
from ds_ext.optimizer import RuleOptimizer

Saved = Mapping[str, Any]  # what one rank saved, or a part of it


class Own(NamedTuple):
    """What a rank has of a parameter."""

    name: str
    run: Tensor  # of the weight, [len(shard)]
    shard: Shard
    place: int = 0  # which of ``parts`` equal parts it is
    parts: int = 1
    # of a stack of experts of which other ranks have others: the first one, and the shape of all
    experts: tuple[int, tuple[int, ...]] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts[1] if self.experts else self.shard.shape

    @property
    def part(self) -> Part:
        """Where the run lies in what all ranks have together."""
        before = self.experts[0] * math.prod(self.shape[1:]) if self.experts else 0
        run = slice(before + self.shard.start, before + self.shard.stop)
        return Part.of(run, math.prod(self.shape))


def save(optimizer: RuleOptimizer, owned: Mapping[Tensor, Own]) -> dict[str, Any]:
    """One rank's part of a checkpoint."""
    state, weights = {}, {}
    for param, own in owned.items():
        values = optimizer.weights(param, own.run, own.shard)
        weights[own.name] = piece(values, own.part, shape=list(own.shape))
        if kept := optimizer.state.get(param):
            is_writer = optimizer.number_of[param] % own.parts == own.place
            parts = optimizer.keeps(param, own.shard, optimizer.rule_of(param))
            state[own.name] = {"step": kept["step"], **_pieces(kept, parts, is_writer)}
    return {
        "ds_ext": VERSION,
        "optimizer": type(optimizer).__name__,
        "weights": weights,
        "state": state,
        "groups": [
            {**group, "params": _of_all_ranks(owned[p].name for p in group["params"])}
            for group in optimizer.param_groups
        ],
    }


def _of_all_ranks(names: Iterable[str]) -> list[str]:
    """Names without the numbers of deepspeed.moe's experts, of which ranks have different ones."""
    return list(dict.fromkeys(re.sub(r"(?<=\bdeepspeed_experts\.)\d+", "*", n) for n in names))


def piece(values: Tensor, part: Part, **more: Any) -> dict[str, Any]:
    """A piece of what is saved. Memory that it shares with more than itself is not saved."""
    values = values.detach()
    if values.untyped_storage().nbytes() > values.nbytes:
        values = values.to("cpu", copy=True)
    return {"start": part.start, "total": part.total, "values": values, **more}


def _pieces(kept: Mapping[str, Any], parts: Parts, is_writer: bool) -> dict[str, Any]:
    """The pieces of a state; of what is the same on every rank, if this one is to write it."""
    saved: dict[str, Any] = {}
    for key, part in parts.items():
        if not isinstance(part, Part):
            saved[key] = _pieces(kept[key], part, is_writer)
        elif is_writer or not part.is_shared:
            saved[key] = piece(kept[key], part)
    return saved


class Pieces:
    """What all ranks saved, read a piece at a time: their files may be mapped, not in memory."""

    def __init__(self, saved: Sequence[Saved]) -> None:
        self.saved = saved

    def find(self, *keys: str) -> Iterator[Any]:
        """What the ranks saved under these keys, those of them that saved any."""
        for found in self.saved:
            for key in keys:
                found = found.get(key, {})
            if found:
                yield found

    def lacks(self, part: Part, *keys: str) -> bool:
        """Whether not all elements of a part were saved, or those of another total."""
        at = part.start
        for found in self._pieces(keys):
            if found["total"] != part.total:
                return True
            if found["start"] <= at:
                at = max(at, found["start"] + found["values"].shape.numel())
        return at < part.stop

    def read(self, part: Part, *keys: str) -> Tensor:
        """The elements of a part, flat, on the CPU."""
        values, at = torch.empty(0, dtype=torch.float32, device="cpu"), part.start
        for found in self._pieces(keys):
            first = found["start"]
            stop = min(part.stop, first + found["values"].shape.numel())
            if first <= at < stop:
                flat = found["values"].contiguous().view(-1)
                if at == part.start:
                    values = flat.new_empty(part.stop - part.start)
                values[at - part.start : stop - part.start] = flat[at - first : stop - first]
                at = stop
        return values

    def _pieces(self, keys: tuple[str, ...]) -> list[Saved]:
        return sorted(self.find(*keys), key=lambda piece: piece["start"])


def check(
    pieces: Pieces, optimizer: RuleOptimizer, owned: Mapping[Tensor, Own], strict: bool
) -> None:
    """Raises CheckpointError if what was saved is not of this optimizer and these parameters."""
    kind = type(optimizer).__name__
    first = pieces.saved[0]
    if first["optimizer"] != kind:
        raise CheckpointError(
            f"this checkpoint is of {first['optimizer']}, the optimizer is {kind}. To take its "
            "weights alone: load_checkpoint(..., load_optimizer_states=False)."
        )
    check_weights(pieces, owned, strict)
    names = [
        _of_all_ranks(owned[p].name for p in group["params"]) for group in optimizer.param_groups
    ]
    saved_names: list[list[str]] = [group["params"] for group in first["groups"]]
    none: list[str] = []
    for i, (theirs, mine) in enumerate(zip_longest(saved_names, names, fillvalue=none)):
        if theirs != mine:
            differ = sorted(set(theirs).symmetric_difference(mine))[:5]
            raise CheckpointError(
                "this checkpoint has other parameter groups than the optimizer: group "
                f"{i} differs in {', '.join(differ) or 'the order of its parameters'}."
            )
    for group, saved in zip(optimizer.param_groups, first["groups"], strict=True):
        rule = optimizer.hypers(
            **{name: saved[name] for name in hyperparams.names(optimizer.hypers)}
        )
        for param in group["params"]:
            own = owned[param]
            if next(pieces.find("state", own.name), None) is not None:
                for keys, part in leaves(optimizer.keeps(param, own.shard, rule)):
                    if pieces.lacks(part, "state", own.name, *keys):
                        what = ".".join(keys)
                        raise CheckpointError(f"this checkpoint lacks some of {own.name}'s {what}.")


def check_weights(pieces: Pieces, owned: Mapping[Tensor, Own], strict: bool) -> None:
    """Raises CheckpointError if weights of the model are missing, or have other shapes."""
    missing = []
    for own in owned.values():
        found = next(pieces.find("weights", own.name), None)
        if found is None:
            missing.append(own.name)
        elif tuple(found["shape"]) != own.shape:
            raise CheckpointError(
                f"this checkpoint is of another model: {own.name} has the shape "
                f"{tuple(found['shape'])} in it and {own.shape} in the model."
            )
        elif pieces.lacks(own.part, "weights", own.name):
            raise CheckpointError(f"this checkpoint lacks some of {own.name}.")
    known = set(_of_all_ranks(own.name for own in owned.values()))
    unknown = (
        set(_of_all_ranks(name for saved in pieces.saved for name in saved["weights"])) - known
    )
    if strict and (missing or unknown):
        parts = [f"it lacks {', '.join(missing[:5])}"] if missing else []
        parts += [f"the model lacks {', '.join(sorted(unknown)[:5])}"] if unknown else []
        raise CheckpointError(f"this checkpoint is of another model: {'; '.join(parts)}.")


@torch.no_grad()
def load_state(pieces: Pieces, optimizer: RuleOptimizer, owned: Mapping[Tensor, Own]) -> None:
    """Puts back this rank's part of state and groups, before ``load_weights``, after ``check``."""
    for group, saved in zip(optimizer.param_groups, pieces.saved[0]["groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k != "params"})
    optimizer.state.clear()
    for param, own in owned.items():
        found = next(pieces.find("state", own.name), None)
        if found is not None:
            parts = optimizer.keeps(param, own.shard, optimizer.rule_of(param))
            state = _state(pieces, parts, own, param.device, optimizer.home)
            optimizer.state[param] = {**state, "step": found["step"]}


@torch.no_grad()
def load_weights(
    pieces: Pieces, optimizer: RuleOptimizer, owned: Mapping[Tensor, Own]
) -> list[str]:
    """Puts back this rank's part of the weights -> names of those that were not saved."""
    missing = []
    for param, own in owned.items():
        if next(pieces.find("weights", own.name), None) is None:
            missing.append(own.name)
            continue
        values = pieces.read(own.part, "weights", own.name)
        optimizer.write_weights(param, own.run, own.shard, values)
    return missing


def _state(
    pieces: Pieces,
    parts: Parts,
    own: Own,
    device: torch.device,
    where: host_offload.Home | None,
    *above: str,
) -> State:
    """This rank's part of a parameter's state, where it lies between steps.

    Of what lies under the keys ``above``.
    """
    made: State = {}
    for key, part in parts.items():
        if isinstance(part, Part):
            values = pieces.read(part, "state", own.name, *above, key)
            dtype = part.dtype or ops.accumulator(own.run.dtype)
            made[key] = host_offload.place(values.view(part.shape).to(dtype), device, where)
        else:
            made[key] = _state(pieces, part, own, device, where, *above, key)
    return made
