"""States of DTensors, converted for torch.distributed.checkpoint.

A state tensor with one number per element, or the same count per row, is saved as a DTensor that
is placed like its parameter, so it loads on any number of ranks. A tensor that is the same on every
rank is saved as a plain tensor. A tensor that cannot be cut by rows is gathered first, after all
ranks have converted their states without an error.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_ext.distributed import consensus, groups
from ds_ext.distributed.dtensors import is_dtensor, local, lying_as, ranks_of
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts, State, StateMismatch, changed, leaves, without_caches
from ds_ext.optimizer import param_checks
from ds_ext.optimizer.param_table import ParamTable

T = TypeVar("T")
Path = tuple[str, ...]  # keys of dicts, from the outermost


def on_all_ranks(table: ParamTable, action: Callable[[], T]) -> T:
    """Returns the result of ``action``; if it fails on one rank of DTensors, raises on all.

    All ranks of the table's DTensors call this function. ``action`` may call it too, and make no
    other collective call.
    """
    group = groups.of_ranks(ranks_of(table.params()))
    return action() if group is None else consensus.run_on_all_ranks(action, group=group)


def is_any(table: ParamTable, flag: bool) -> bool:
    """Returns whether ``flag`` is true on any rank of DTensors, which all call this function."""
    group = groups.of_ranks(ranks_of(table.params()))
    return flag if group is None else any(consensus.gathered(flag, group))


def saved(table: ParamTable, param: Tensor, state: State) -> State:
    """Returns a parameter's state as it is saved, without caches; call ``gathered`` with it.

    DTensors share memory with the state. Tensors of other parameters are returned as they are.

    Raises:
        ValueError: the state is of other hyper-parameters than the parameter's group has now.
    """
    placement, rule = table.placement(param), table.rule_of(param)
    parts = table.state_spec(param, table.shard(param), rule)
    try:
        state = without_caches(state, parts)
    except StateMismatch as why:
        raise param_checks.unfit_state(table, param, why) from None
    if placement is None:
        return state
    shard = placement.shard(param)
    declared = _declared(parts, shard)
    rows = [(i, _declared(table.state_spec(param, row, rule), row)) for i, row in _rows(shard)]

    def spread(path: Path, x: Any) -> object:
        """Makes a tensor a DTensor, unless every rank holds it whole."""
        part = declared.get(path)
        if part is None or part.is_shared:
            return x
        shape = _shape(part, [(i, row.get(path)) for i, row in rows], shard)
        if shape is None:
            return functools.partial(_whole, x, part, placement.statistics_group)
        own = tuple(local(param).shape)
        of_rank = own if shape == shard.shape else (own[0], *shape[1:])
        return lying_as(param, x.view(of_rank), shape)

    return changed(state, spread)


def gathered(state: Mapping[str, Any]) -> State:
    """Returns a state of ``saved`` whose uncut tensors are gathered. All ranks call it."""
    return changed(state, lambda _, x: x() if isinstance(x, functools.partial) else x)


def own(table: ParamTable, param: Tensor, state: State, parts: Parts) -> State:
    """Returns this rank's part of a state that ``saved`` returned, on any number of ranks.

    The state of a parameter that is no DTensor, and tensors that are placed unexpectedly, are
    returned as they are. ``parts`` are those of this rank's run.
    """
    placement = table.placement(param)
    if placement is None:
        return state
    declared = _declared(parts, placement.shard(param))

    def take(path: Path, x: object) -> object:
        """Takes this rank's part of a tensor."""
        part = declared.get(path)
        if not isinstance(x, Tensor) or part is None:
            return x
        if is_dtensor(x):
            held, n = local(x), part.stop - part.start
            return held.reshape(part.shape) if held.numel() == n else held
        if part.is_shared or x.numel() != part.total:
            return x
        return x.flatten()[part.start : part.stop].view(part.shape)

    return changed(state, take)


def _declared(parts: Parts, shard: Shard) -> dict[Path, Part]:
    """The declared parts of a run's state, with its master, by their paths of keys."""
    return {**dict(leaves(parts)), ("master",): Part.like(shard)}


def _rows(shard: Shard) -> list[tuple[int, Shard]]:
    """The first, second and last row: whether a state is cut at every row of the parameter."""
    rows = shard.shape[0]
    if shard.split is not None or not rows:
        return []
    size = shard.numel // rows
    numbers = sorted({0, min(1, rows - 1), rows - 1})
    return [(i, Shard(shard.shape, i * size, (i + 1) * size, size)) for i in numbers]


def _shape(
    part: Part, of_rows: Sequence[tuple[int, Part | None]], shard: Shard
) -> tuple[int, ...] | None:
    """The full shape of a tensor that can be cut like its parameter; None if it cannot.

    All ranks return the same, unless the parameter is cut in other ways than by rows.
    """
    if not of_rows:
        is_like = (part.start, part.stop, part.total) == (shard.start, shard.stop, shard.numel)
        return shard.shape if is_like else None
    size, rest = divmod(part.total, shard.shape[0])
    are_cut = (
        found is not None and (found.start, found.stop) == (i * size, (i + 1) * size)
        for i, found in of_rows
    )
    if rest or not size or not all(are_cut):
        return None
    return shard.shape if part.total == shard.numel else (shard.shape[0], size)


def _whole(x: Tensor, part: Part, group: groups.Group) -> Tensor:
    """Gathers all ranks' elements of a tensor, [total]; all ranks call it."""
    if group is None:
        return x.flatten()
    pieces = consensus.gathered((part.start, x.cpu().flatten()), group)
    whole = torch.empty(part.total, dtype=x.dtype, device=x.device)
    for start, values in pieces:
        whole[start : start + len(values)] = values.to(x.device)
    return whole
