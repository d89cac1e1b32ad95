"""Whether what is kept of a parameter is what its rule declares: its keys, shapes and dtypes.

Passes over memory take their sizes from the parameter. So every state is checked where it comes in:
when it is loaded, and when a step first finds it beside a run of these sizes and dtypes (``plans``
tells at each step whether they are still the same).
"""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.distributed.dtensors import is_dtensor
from ds_ext.ops import weight_update
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Part, Parts, zeros
from ds_ext.optimizer import spread_state, unfit
from ds_ext.optimizer.group_rules import GroupRules

if TYPE_CHECKING:
    from ds_ext.optimizer.rule_optimizer import RuleOptimizer
    from ds_ext.optimizer.run_updates import RunUpdate

State = dict[str, Any]


class Misfit(Exception):
    """What differs between a state and what its rule declares, in words."""


def make(optimizer: "RuleOptimizer", u: "RunUpdate", state: State) -> None:
    """Makes the state of a run that has none yet.

    Raises:
        ValueError: the rule is not for parameters of this shape.
    """
    unfit.refuse_shape(optimizer, u.param, u.shard)
    parts = optimizer.keeps(u.param, u.shard, optimizer.rule_of(u.param))
    state.update(zeros(parts, u.p, optimizer.number_of[u.param]), step=0)


def check(optimizer: "RuleOptimizer", u: "RunUpdate", state: State) -> None:
    """Casts and moves a state to what a run needs.

    Raises:
        ValueError: the run has another size than its parameter's part, or its state does not fit.
    """
    n, sizes = len(u.shard), (u.p.numel(), u.g.numel())
    if sizes != (n, n):
        raise ValueError(
            f"{type(optimizer).__name__}: {name(optimizer, u.param)} has {sizes[0]} elements and "
            f"its gradient {sizes[1]}, and {n} are to be stepped. Compute the gradients anew after "
            "parameters were given other data."
        )
    check_kept(optimizer, u.param, u.shard, state, u.p.dtype, u.g.device)


def check_kept(
    optimizer: "RuleOptimizer",
    param: Tensor,
    shard: Shard,
    state: State,
    dtype: torch.dtype,
    device: torch.device | None,
) -> None:
    """Casts a state, and moves it to ``device`` if that is given.

    Args:
        optimizer: of the parameter.
        param: the parameter.
        shard: which elements of it are stepped here.
        state: what is kept of them, changed in place.
        dtype: of the weights.
        device: where the state is to lie; None: where it is.

    Raises:
        ValueError: it does not fit.
    """
    parts = optimizer.keeps(param, shard, optimizer.rule_of(param))
    try:
        fit(parts, state, len(shard), dtype, device)
    except Misfit as why:
        raise ValueError(
            f"{type(optimizer).__name__}: the state of {name(optimizer, param)} does not fit it: "
            f"{why}. If the parameter was resized, or its state edited, begin the state anew: "
            "del optimizer.state[param]."
        ) from None


def read(optimizer: "RuleOptimizer", state_dict: Mapping[str, Any]) -> dict[Any, State]:
    """Returns copies of the states of a state dict, by their number, as their rules keep them.

    Args:
        optimizer: the one that is to go on with them; it is not changed.
        state_dict: what ``state_dict()`` returned, on any ranks.

    Raises:
        ValueError: they are of another optimizer, or of parameters of other shapes.
    """
    kind, params = type(optimizer).__name__, optimizer.params()
    groups = state_dict["param_groups"]
    unfit.refuse_saved_groups(optimizer, groups)
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
        return {}  # which torch refuses
    of_saved = GroupRules(optimizer.rule)
    rule_of = [of_saved.of(row, group) for row, group in enumerate(groups) for _ in group["params"]]
    ids = itertools.chain(*(group["params"] for group in groups))
    found: dict[Any, State] = {}
    for i, param, rule in zip(ids, params, rule_of, strict=True):
        given = state_dict["state"].get(i)
        if not given:
            continue
        unfit.refuse_states(optimizer, {param: given}, optimizer.stacks)
        shard = optimizer.shard(param)
        parts = optimizer.keeps(param, shard, rule)
        state = _copied(spread_state.own(optimizer, param, given, parts))
        try:
            fit(parts, state, len(shard), param.dtype, param.device, copy=True)
        except Misfit as why:
            raise ValueError(
                f"not a state of {kind} for these parameters: that of {name(optimizer, param)} "
                f"does not fit it: {why}. Nothing was loaded."
            ) from None
        found[i] = state
    return found


def fit(
    parts: Parts,
    state: State,
    n: int,
    dtype: torch.dtype,
    device: torch.device | None,
    copy: bool = False,
) -> None:
    """Makes a state in place what a rule declares, by casts between floating dtypes and moves.

    A master of a weight that has another dtype now is dropped. Other keys are left alone.

    Args:
        parts: what the rule declares.
        state: "step", what is kept beside the weight, and what the rule keeps.
        n: elements of the run.
        dtype: of its weights.
        device: where the state is to lie; None: where it is.
        copy: whether its tensors are to be in memory of their own.

    Raises:
        Misfit: it cannot be made so.
    """
    step = _number_of_steps(state)
    if state["step"] is not step:
        state["step"] = step
    like = dtype, device, copy
    _fit(parts, state, *like)
    master = state.get("master")
    if isinstance(master, Tensor) and master.dtype == torch.int16 and dtype == torch.float16:
        weight_update.drop(state)  # the lower half of a bf16 weight, which is no more
    for key, part in weight_update.master_parts(state, n).items():
        state[key] = _fitted(part, state[key], *like, key)


def _fit(
    parts: Parts,
    state: Any,
    dtype: torch.dtype,
    device: torch.device | None,
    copy: bool,
    *above: str,
) -> None:
    """The same of what lies under the keys ``above``."""
    if not isinstance(state, dict):
        raise Misfit(
            f"{'.'.join(above)} is {type(state).__name__}, and {', '.join(parts)} are kept"
        )
    for key, part in parts.items():
        if key not in state:
            raise Misfit(_lacks(".".join((*above, key))))
        if isinstance(part, Part):
            state[key] = _fitted(part, state[key], dtype, device, copy, *above, key)
        else:
            _fit(part, state[key], dtype, device, copy, *above, key)


def _fitted(
    part: Part, x: Any, dtype: torch.dtype, device: torch.device | None, copy: bool, *keys: str
) -> Tensor:
    """A tensor of a state as it is declared: itself, if it is so."""
    wanted = part.dtype or ops.accumulator(dtype)
    if not isinstance(x, Tensor) or is_dtensor(x):
        raise Misfit(f"{'.'.join(keys)} is {type(x).__name__}, no tensor of this process")
    if x.shape != part.shape:
        raise Misfit(f"{'.'.join(keys)} has the shape {[*x.shape]}, and {[*part.shape]} is kept")
    is_cast = x.dtype != wanted
    if is_cast and not (x.is_floating_point() and wanted.is_floating_point):
        raise Misfit(f"{'.'.join(keys)} is {x.dtype}, and {wanted} is kept")
    if not copy and not is_cast and x.device == (device or x.device) and x.is_contiguous():
        return x
    found = x.detach().to(device or x.device, wanted, copy=copy)
    return found.contiguous()


def _number_of_steps(state: State) -> int:
    """The "step" of a state, which torch's optimizers keep as a tensor."""
    if "step" not in state:
        raise Misfit(_lacks("step"))
    step = state["step"]
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    if not isinstance(step, (int, float)) or step < 0 or int(step) != step:
        raise Misfit(f"its step is {step!r}, no number of steps")
    return int(step)


def _lacks(key: str) -> str:
    return f"it lacks {key}"


def _copied(value: Any) -> Any:
    """A state whose dicts are copies."""
    return {k: _copied(x) for k, x in value.items()} if isinstance(value, Mapping) else value


def name(optimizer: "RuleOptimizer", param: Tensor) -> str:
    """Returns the name of a parameter, or what else tells it from others."""
    if optimizer.fused is not None:
        return optimizer.fused.name(param)
    group = optimizer.group_of[param]
    at = next(i for i, p in enumerate(group["params"]) if p is param)
    names = group.get("param_names")
    if names:
        return str(names[at])
    return f"parameter {at} of group {optimizer.row_of[param]}, of shape {[*param.shape]},"
