"""States of DTensors as torch.distributed.checkpoint saves and loads them.

What an optimizer keeps of a part, one number for each element or as many for each row, is a DTensor
that lies as the parameter does: it loads on any number of ranks. What every rank keeps is a plain
tensor, and so is what cannot be cut by rows, brought together from all ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ds_ext.distributed import consensus
from ds_ext.distributed.dtensors import is_dtensor, local, lying_as
from ds_ext.distributed.placement import Placement
from ds_ext.ops import weight_update
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts, zeros
from ds_ext.optimizer import unfit

if TYPE_CHECKING:
    from ds_ext.optimizer.rule_optimizer import RuleOptimizer


@torch.no_grad()
def make(optimizer: "RuleOptimizer", params: Iterable[Tensor]) -> None:
    """Makes the states of DTensors that are trained: what is loaded into has to be there.

    torch.distributed.checkpoint would make them by a step, which need not be possible.

    Args:
        optimizer: of the parameters.
        params: those that may lack a state; others than DTensors are left without.
    """
    for param in params:
        at = optimizer.whereabouts.of(param)
        if at is None or param.device.type == "meta" or not param.requires_grad:
            continue
        state, rule, run = optimizer.state[param], optimizer.rule_of(param), at.run(param)
        if not state:
            shard = at.shard(param)
            unfit.refuse_shape(optimizer, param, shard)
            parts = optimizer.keeps(param, shard, rule)
            state.update(zeros(parts, run, optimizer.number_of[param]), step=0)
            if run.dtype == torch.bfloat16:  # another master would be a copy of old weights
                state.update(weight_update.master(run, rule))
                weight_update.mark(run, state)


def saved(optimizer: "RuleOptimizer", param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Returns what is saved of a parameter's state: tensors share memory where they lie alike.

    All ranks of the parameter call it, for what cannot be cut by rows is gathered.

    Args:
        optimizer: of the parameter.
        param: whose state it is; that of no DTensor is saved as it is.
        state: what this rank keeps, nested in dicts.
    """
    at = optimizer.whereabouts.of(param)
    if at is None:
        return state
    kept = Kept.of(optimizer, param, at.shard(param))
    rows = [Kept.of(optimizer, param, row) for row in _some_rows(kept.shard)]
    return _spread(state, kept, rows, param, at)


def own(
    optimizer: "RuleOptimizer", param: Tensor, state: Mapping[str, Any], parts: Parts
) -> Mapping[str, Any]:
    """Returns what this rank keeps of a state that ``saved`` has returned, on any ranks.

    Args:
        optimizer: of the parameter.
        param: whose state it is; that of no DTensor is returned as it is.
        state: the saved one. What does not lie as it should in it is left as it is.
        parts: what is kept of this rank's run.
    """
    at = optimizer.whereabouts.of(param)
    return state if at is None else _own(state, Kept(parts, at.shard(param)))


class Kept(NamedTuple):
    """What is kept of a run, or what lies under a key of that."""

    parts: Parts
    shard: Shard

    @classmethod
    def of(cls, optimizer: "RuleOptimizer", param: Tensor, shard: Shard) -> "Kept":
        """What a parameter's rule keeps of a run."""
        return cls(optimizer.keeps(param, shard, optimizer.rule_of(param)), shard)

    def below(self, key: str) -> "Kept":
        """What lies under a key."""
        inner = self.parts.get(key, {})
        return Kept({} if isinstance(inner, Part) else inner, self.shard)

    def part(self, key: str) -> Part | None:
        """What a tensor is, None of what is none."""
        if key in weight_update.MASTER:
            return Part.like(self.shard)
        part = self.parts.get(key)
        return part if isinstance(part, Part) else None


def _spread(
    state: Mapping[str, Any], kept: Kept, rows: Sequence[Kept], param: Tensor, at: Placement
) -> dict[str, Any]:
    """The state of a part as DTensors, but for what lies whole on every rank."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        part = kept.part(key)
        if key == "marks":  # of a run, whose weights are loaded elsewhere
            continue
        if isinstance(value, Mapping):
            below = [row.below(key) for row in rows]
            found[key] = _spread(value, kept.below(key), below, param, at)
        elif part is None or part.is_shared:
            found[key] = value
        else:
            shape = _shape(part, [row.part(key) for row in rows], kept.shard)
            found[key] = (
                _whole(value, part, at)
                if shape is None
                else lying_as(param, value.view(_of_rank(shape, param)), shape)
            )
    return found


def _own(state: Mapping[str, Any], kept: Kept) -> dict[str, Any]:
    """This rank's part of such a state."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        part = kept.part(key)
        if isinstance(value, Mapping):
            found[key] = _own(value, kept.below(key))
        elif not isinstance(value, Tensor) or part is None:
            found[key] = value
        elif is_dtensor(value):
            held, n = local(value), part.stop - part.start
            found[key] = held.reshape(part.shape) if held.numel() == n else held
        else:
            is_whole = not part.is_shared and value.numel() == part.total
            whole_part = value.flatten()[part.start : part.stop] if is_whole else value
            found[key] = whole_part.view(part.shape) if is_whole else value
    return found


def _some_rows(shard: Shard) -> list[Shard]:
    """Rows of a parameter, in its first dimension, that show how a state is cut by them."""
    rows = shard.shape[0]
    if shard.split is not None or not rows:
        return []
    size = shard.numel // rows
    return [Shard(shard.shape, i * size, (i + 1) * size, size) for i in _probed(rows)]


def _probed(rows: int) -> list[int]:
    """Which rows: a cut that is not at all of them is not at the second."""
    return sorted({0, min(1, rows - 1), rows - 1})


def _shape(part: Part, of_rows: Sequence[Part | None], shard: Shard) -> tuple[int, ...] | None:
    """The whole shape of what can be cut as the parameter is; None of what cannot.

    It depends on no rank's run, but for parameters that are cut in other ways than by rows.
    """
    if part.total == shard.numel and not of_rows:
        is_like = (part.start, part.stop) == (shard.start, shard.stop)
        return shard.shape if is_like else None
    rows = shard.shape[0] if shard.shape else 1
    if not of_rows or not part.total or part.total % rows:
        return None
    size = part.total // rows
    starts = sorted({i * size for i in _probed(rows)})
    for found, start in zip(of_rows, starts, strict=True):
        if found is None or (found.start, found.stop) != (start, start + size):
            return None
    return shard.shape if part.total == shard.numel else (rows, size)


def _of_rank(shape: tuple[int, ...], param: Tensor) -> tuple[int, ...]:
    """The shape of this rank's part of what lies as a parameter does."""
    own_shape = tuple(local(param).shape)
    return own_shape if shape == tuple(param.shape) else (own_shape[0], *shape[1:])


def _whole(kept: Tensor, part: Part, at: Placement) -> Tensor:
    """All ranks' elements of a tensor, [total]; they call it together."""
    if at.statistics_group is None:
        return kept.flatten()
    pieces = consensus.gathered((part.start, kept.cpu().flatten()), at.statistics_group)
    whole = torch.empty(part.total, dtype=kept.dtype, device=kept.device)
    for start, values in pieces:
        whole[start : start + len(values)] = values.to(kept.device)
    return whole
