"""States of DTensors, converted for torch.distributed.checkpoint.

A state tensor with one number per element, or the same count per row, is saved as a DTensor that
is placed like its parameter, so it loads on any number of ranks. A tensor that is the same on every
rank is saved as a plain tensor. A tensor that cannot be cut by rows is gathered first, after all
ranks have converted their states without an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ds_ext.distributed import consensus, groups
from ds_ext.distributed.dtensors import is_dtensor, local, lying_as, ranks_of
from ds_ext.distributed.placement import Placement
from ds_ext.ops import sixteen_bit
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts, State, StateMismatch, without_caches, zeros
from ds_ext.optimizer import param_checks
from ds_ext.optimizer.param_table import ParamTable

T = TypeVar("T")


def on_all_ranks(table: ParamTable, action: Callable[[], T]) -> T:
    """Returns the result of ``action``; if it fails on one rank of DTensors, raises on all.

    Args:
        table: the table of the optimizer. All ranks of its DTensors call this function.
        action: what to run. It may call this function, and make no other collective call.
    """
    group = groups.of_ranks(ranks_of(table.params()))
    return action() if group is None else consensus.run_on_all_ranks(action, group=group)


def is_any(table: ParamTable, flag: bool) -> bool:
    """Returns whether ``flag`` is true on any rank of DTensors, which all call this function."""
    group = groups.of_ranks(ranks_of(table.params()))
    return flag if group is None else any(consensus.gathered(flag, group))


@torch.no_grad()
def make(table: ParamTable, params: Iterable[Tensor]) -> None:
    """Makes the missing states of trained DTensors, so that a checkpoint can load into them.

    torch.distributed.checkpoint would make them by a step, which is not always possible.

    Args:
        table: the table of the optimizer.
        params: the parameters; those that are no DTensors are skipped.
    """
    for param in params:
        placement = table.placement(param)
        if placement is None or param.device.type == "meta" or not param.requires_grad:
            continue
        state, rule, run = table.state[param], table.rule_of(param), placement.run(param)
        if not state:
            shard = placement.shard(param)
            param_checks.refuse_shape(table, param, shard)
            parts = table.state_spec(param, shard, rule)
            state.update(zeros(parts, run, table.number_of[param]), step=0)
            if run.dtype == torch.bfloat16:  # a master made later would copy old weights
                state.update(sixteen_bit.master(run, rule))


def saved(table: ParamTable, param: Tensor, state: State) -> State:
    """Returns a parameter's state as it is saved, without caches; call ``gathered`` with it.

    DTensors share memory with the state.

    Args:
        table: the table of the optimizer.
        param: the parameter; if it is no DTensor, the tensors of its state are returned.
        state: this rank's state, nested in dicts.

    Raises:
        ValueError: the state is of other hyper-parameters than the parameter's group has now.
    """
    placement, rule = table.placement(param), table.rule_of(param)
    try:
        state = without_caches(state, table.state_spec(param, table.shard(param), rule))
    except StateMismatch as why:
        raise param_checks.unfit_state(table, param, why) from None
    if placement is None:
        return state
    declared = DeclaredState.of(table, param, placement.shard(param))
    rows = [DeclaredState.of(table, param, row) for row in _some_rows(declared.shard)]
    return _spread(state, declared, rows, param, placement)


def gathered(state: Mapping[str, Any]) -> State:
    """Returns a state of ``saved`` whose uncut tensors are gathered. All ranks call it."""
    return {
        key: gathered(value)
        if isinstance(value, Mapping)
        else _whole(value)
        if isinstance(value, _Uncut)
        else value
        for key, value in state.items()
    }


class _Uncut(NamedTuple):
    """This rank's elements of a tensor that cannot be cut like its parameter."""

    values: Tensor
    part: Part
    placement: Placement


def own(table: ParamTable, param: Tensor, state: State, parts: Parts) -> State:
    """Returns this rank's part of a state that ``saved`` returned, on any number of ranks.

    Args:
        table: the table of the optimizer.
        param: the parameter; if it is no DTensor, the state is returned as it is.
        state: the saved state. Tensors that are placed unexpectedly are returned as they are.
        parts: what the rule declares for this rank's run.
    """
    placement = table.placement(param)
    return state if placement is None else _own(state, DeclaredState(parts, placement.shard(param)))


class DeclaredState(NamedTuple):
    """The declared state of a run, or the part of it under a key."""

    parts: Parts
    shard: Shard

    @classmethod
    def of(cls, table: ParamTable, param: Tensor, shard: Shard) -> "DeclaredState":
        """The state that a parameter's rule declares for a run."""
        return cls(table.state_spec(param, shard, table.rule_of(param)), shard)

    def below(self, key: str) -> "DeclaredState":
        """The part under a key."""
        inner = self.parts.get(key, {})
        return DeclaredState({} if isinstance(inner, Part) else inner, self.shard)

    def part(self, key: str) -> Part | None:
        """The declaration of a tensor; None if the key has none."""
        if key == "master":
            return Part.like(self.shard)
        part = self.parts.get(key)
        return part if isinstance(part, Part) else None


def _spread(
    state: Mapping[str, Any],
    declared: DeclaredState,
    rows: Sequence[DeclaredState],
    param: Tensor,
    placement: Placement,
) -> State:
    """Converts this rank's state tensors to DTensors, except those that every rank holds whole."""
    found: State = {}
    for key, value in state.items():
        part = declared.part(key)
        if isinstance(value, Mapping):
            below = [row.below(key) for row in rows]
            found[key] = _spread(value, declared.below(key), below, param, placement)
        elif part is None or part.is_shared:
            found[key] = value
        else:
            shape = _shape(part, [row.part(key) for row in rows], declared.shard)
            if shape is None:
                found[key] = _Uncut(value, part, placement)
            else:
                found[key] = lying_as(param, value.view(_of_rank(shape, param)), shape)
    return found


def _own(state: Mapping[str, Any], declared: DeclaredState) -> State:
    """This rank's part of a state that ``_spread`` returned."""
    found: State = {}
    for key, value in state.items():
        part = declared.part(key)
        if isinstance(value, Mapping):
            found[key] = _own(value, declared.below(key))
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
    """Some rows of a parameter, which show how its state is cut along the first dimension."""
    rows = shard.shape[0]
    if shard.split is not None or not rows:
        return []
    size = shard.numel // rows
    return [Shard(shard.shape, i * size, (i + 1) * size, size) for i in _probed(rows)]


def _probed(rows: int) -> list[int]:
    """Which rows to try: the first, second and last show whether the cut is at every row."""
    return sorted({0, min(1, rows - 1), rows - 1})


def _shape(part: Part, of_rows: Sequence[Part | None], shard: Shard) -> tuple[int, ...] | None:
    """The full shape of a tensor that can be cut like its parameter; None if it cannot.

    All ranks return the same, unless the parameter is cut in other ways than by rows.
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
    """The shape of this rank's part of a DTensor of ``shape`` that is placed like ``param``."""
    own_shape = tuple(local(param).shape)
    return own_shape if shape == tuple(param.shape) else (own_shape[0], *shape[1:])


def _whole(uncut: _Uncut) -> Tensor:
    """Gathers all ranks' elements of a tensor, [total]; all ranks call it."""
    x, part, group = uncut.values, uncut.part, uncut.placement.statistics_group
    if group is None:
        return x.flatten()
    pieces = consensus.gathered((part.start, x.cpu().flatten()), group)
    whole = torch.empty(part.total, dtype=x.dtype, device=x.device)
    for start, values in pieces:
        whole[start : start + len(values)] = values.to(x.device)
    return whole
