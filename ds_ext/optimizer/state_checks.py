"""Makes states, and checks that they have the keys, shapes and dtypes that their rule declares.

Passes over memory take their sizes from the parameter, so a state of another size would make them
read or write out of bounds. A state is checked when it is loaded, and when a step first uses it
with a run of given sizes and dtypes. Later steps compare it with what was checked (``plans``).
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_ext import rules
from ds_ext.distributed.dtensors import is_dtensor
from ds_ext.distributed.layout import Layout
from ds_ext.ops import int8, sixteen_bit
from ds_ext.ops.state import Part, Parts, StateMismatch, mapped, zeros
from ds_ext.optimizer import dtensor_state, ema, expert_stacks, param_checks
from ds_ext.optimizer.param_table import GroupRules, ParamTable, of_this_version
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import State


def make(table: ParamTable, u: RunUpdate, state: State) -> None:
    """Makes the state of a run that has none yet.

    Raises:
        ValueError: the rule cannot step parameters of this shape.
    """
    param_checks.refuse_shape(table, u.param, u.shard)
    parts = table.state_spec(u.param, u.shard, table.rule_of(u.param))
    state.update(zeros(parts, u.p, table.number_of[u.param]), step=0)


@torch.no_grad()
def make_for_dtensors(table: ParamTable, params: Iterable[Tensor]) -> None:
    """Makes the missing states of trained DTensors, so that a checkpoint can load into them.

    torch.distributed.checkpoint would make them by a step, which is not always possible. Parameters
    that are no DTensors are skipped.
    """
    for param in params:
        placement = table.placement(param)
        if placement is None or param.device.type == "meta" or not param.requires_grad:
            continue
        state, shard = table.state[param], placement.shard(param)
        rule, is_matrix = table.rule_of(param), param.dim() == 2 or param in table.stacks
        # A rule for matrices takes stacks of them once ``separate_experts`` has found these.
        if not state and (is_matrix or rules.entry_of(type(rule)).any_shape):
            run = placement.run(param, shard)
            make(table, RunUpdate(param, run, run, shard), state)
            if run.dtype == torch.bfloat16:  # a master made later would copy old weights
                state.update(sixteen_bit.master(run, rule))


def check(table: ParamTable, u: RunUpdate, state: State, device: torch.device | None) -> None:
    """Checks the sizes of a run; casts its state, and moves it to ``device`` if given.

    Starts or drops its average of the weights if ``ema_decay`` has changed. An empty state stays
    empty; ``make`` can then make one.

    Raises:
        ValueError: the weight is complex, weight or gradient have another size than the shard, or
            the state lacks a key, or has a tensor of another shape or kind of dtype; or the rule
            cannot step parameters of this shape.
    """
    param_checks.refuse_complex(table, [u.param])
    n, sizes = len(u.shard), (u.p.numel(), u.g.numel())
    if sizes != (n, n):
        raise ValueError(
            f"{type(table).__name__}: {table.name(u.param)} has {sizes[0]} elements and "
            f"its gradient {sizes[1]}, but the optimizer expects {n}. Compute the gradients again "
            "after you replace the data of parameters."
        )
    if not state:
        param_checks.refuse_shape(table, u.param, u.shard)
        return
    rule = table.rule_of(u.param)
    ema.start_or_drop(rule, u.shard, state, u.p)
    parts = table.state_spec(u.param, u.shard, rule)
    try:
        fit(parts, state, n, u.p.dtype, device)
    except StateMismatch as why:
        raise param_checks.unfit_state(table, u.param, why) from None


def check_model(table: ParamTable, layout: Layout) -> None:
    """Checks that hooks can step all parameters of an optimizer inside backward.

    Raises:
        ValueError: a parameter is not part of the model of ``layout``, or its shape or state does
            not fit its rule.
    """
    strange = sum(p not in layout.names for p in table.group_of)
    if strange:
        raise ValueError(
            f"{strange} of the optimizer's parameters are not in the model: pass the module that "
            "holds all of them, and make the optimizer after fully_shard and to_empty."
        )
    for param in table.group_of:
        shard = layout.shards[param]
        param_checks.refuse_shape(table, param, shard, layout.names[param])
        if state := table.state.get(param):
            with int8.expanded([param]):
                run = layout.run(param)
                check(table, RunUpdate(param, run, run, shard), state, None)


def read(
    table: ParamTable, state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[int, State]]:
    """Returns a state dict's groups as of this version, and copies of its states as rules declare.

    The states are by parameter number. ``table`` is not changed.

    Raises:
        ValueError: they are of another optimizer, of parameters of other sizes, or of a newer
            ds_ext.
    """
    param_checks.refuse_newer(table, state_dict)
    kind, params = type(table).__name__, table.params()
    saved = state_dict["param_groups"]
    groups = [of_this_version(group, table.hypers_of(group)) for group in saved]
    param_checks.refuse_saved_groups(table, groups)
    of_saved = GroupRules(table.rule)
    rule_of = [of_saved.of(row, group) for row, group in enumerate(groups) for _ in group["params"]]
    ids = itertools.chain(*(group["params"] for group in groups))
    found: dict[int, State] = {}
    for i, param, rule in zip(ids, params, rule_of, strict=True):
        given = state_dict["state"].get(i)
        if not given:
            continue
        expert_stacks.check_state(kind, param, given, param in table.stacks)
        shard = table.shard(param)
        parts = table.state_spec(param, shard, rule)
        own = dtensor_state.own(table, param, given, parts)
        state = mapped(own, lambda x: x.detach().clone())
        try:
            fit(parts, state, len(shard), param.dtype, param.device)
        except StateMismatch as why:
            raise ValueError(
                f"not a state of {kind} for these parameters: the state of {table.name(param)} "
                f"does not fit it: {why}. Nothing was loaded."
            ) from None
        found[i] = state
    return groups, found


def fit(
    parts: Parts, state: State, n: int, dtype: torch.dtype, device: torch.device | None
) -> None:
    """Casts and moves a state in place to what a rule declares; casts only floating dtypes.

    If the weight now has another dtype, its master is dropped. Undeclared keys do not change.
    ``state`` may have a master of the weight; the run has n weights of ``dtype``. It is put on
    ``device``, None: where it is. Tensors that fit already are not copied.

    Raises:
        StateMismatch: a key is missing, or a tensor has another shape or kind of dtype.
    """
    step = _number_of_steps(state)
    if state["step"] is not step:
        state["step"] = step
    master = state.get("master")
    if isinstance(master, Tensor) and master.dtype == torch.int16 and dtype == torch.float16:
        del state["master"]  # the lower half of a weight that was bf16
    state.pop("marks", None)  # hashes of weights, from version 1.0
    _fit({**parts, **sixteen_bit.master_parts(state, n)}, state, dtype, device)


def _fit(
    parts: Parts, state: object, dtype: torch.dtype, device: torch.device | None, *above: str
) -> None:
    """Fits the part of a state under the keys ``above``."""
    if not isinstance(state, dict):
        raise StateMismatch(
            f"{'.'.join(above)} is {type(state).__name__}, not a dict of {', '.join(parts)}"
        )
    for key, part in parts.items():
        if key not in state:
            if isinstance(part, Part) and part.is_cache:
                continue
            raise StateMismatch(f"it lacks {'.'.join((*above, key))}")
        if isinstance(part, Part):
            state[key] = _fitted(part, state[key], dtype, device, *above, key)
        else:
            _fit(part, state[key], dtype, device, *above, key)


def _fitted(
    part: Part, x: object, dtype: torch.dtype, device: torch.device | None, *keys: str
) -> Tensor:
    """Returns a tensor with the declared dtype on ``device``: itself, if it fits already."""
    if not isinstance(x, Tensor) or is_dtensor(x):
        raise StateMismatch(f"{'.'.join(keys)} is {type(x).__name__}, not a tensor of this process")
    is_cache = part.is_cache and x.is_floating_point()  # its rule chooses the dtype
    wanted = x.dtype if is_cache else part.dtype_for(dtype)
    if x.shape != part.shape:
        raise StateMismatch(f"{'.'.join(keys)} has the shape {[*x.shape]}, not {[*part.shape]}")
    is_cast = x.dtype != wanted
    if is_cast and not (x.is_floating_point() and wanted.is_floating_point):
        raise StateMismatch(f"{'.'.join(keys)} is {x.dtype}, not {wanted}")
    if not is_cast and x.device == (device or x.device) and x.is_contiguous():
        return x
    return x.detach().to(device or x.device, wanted).contiguous()


def _number_of_steps(state: State) -> int:
    """The "step" of a state, which torch's optimizers keep as a tensor."""
    if "step" not in state:
        raise StateMismatch("it lacks step")
    step = state["step"]
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    if not isinstance(step, (int, float)) or step < 0 or int(step) != step:
        raise StateMismatch(f"its step is {step!r}, not a number of steps")
    return int(step)
