"""Checks of parameters and saved groups: ValueError if an optimizer cannot step or load them."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ext import hyperparams, rules
from ds_ext.distributed.dtensors import is_dtensor
from ds_ext.distributed.unsupported_wrappers import refuse_flat
from ds_ext.ops import int8
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import StateMismatch
from ds_ext.optimizer import sections
from ds_ext.optimizer.param_table import ParamTable, names_of_all_rules

FORMAT = 1  # of state dicts; those without a number, as 0.1.0 wrote them, have format 1


def refuse_newer(table: ParamTable, state_dict: Mapping[str, Any]) -> None:
    """Raises ValueError if a newer ds_ext wrote a state dict in a format that is unknown here."""
    found = state_dict.get("ds_ext", 1)
    if found > FORMAT:
        raise ValueError(
            f"this state of {type(table).__name__} has format {found}, but this ds_ext reads "
            f"format {FORMAT}: a newer ds_ext wrote it. Install that version, or a newer one."
        )


def unfit_state(table: ParamTable, param: Tensor, why: StateMismatch) -> ValueError:
    """Returns the error about a state that does not fit its parameter and hyper-parameters."""
    return ValueError(
        f"{type(table).__name__}: the state of {table.name(param)} does not fit it: {why}. If you "
        "resized the parameter, edited its state, or changed a hyper-parameter that decides the "
        "state, such as rank or nbits, undo that, or delete the state: del optimizer.state[param]."
    )


def refuse_params(table: ParamTable, params: Collection[Tensor]) -> None:
    """Raises ValueError for new parameters that cannot be stepped."""
    refuse_flat(params)
    refuse_complex(table, (p for p in params if p.requires_grad))
    if table.fused is not None and any(p not in table.fused.names for p in params):
        raise ValueError(
            "add_param_group, or an edit of param_groups, adds a parameter that is not part of "
            "the model that backward steps. Create the model with it, frozen if necessary."
        )


def refuse_all_frozen(optimizer: ParamTable) -> None:
    """Raises ValueError if no parameter of an optimizer is trained."""
    if not any(p.requires_grad for p in optimizer.group_of):
        raise ValueError(
            f"{type(optimizer).__name__}: all its parameters have requires_grad=False, so nothing "
            "would be trained: call requires_grad_(True) of those to train before "
            "deepspeed.initialize or fuse_into_backward."
        )


def refuse_no_params(optimizer: str, params: Collection[object]) -> None:
    """Raises ValueError if an optimizer gets no parameter, as of a model that is all frozen."""
    if not params:
        raise ValueError(
            "optimizer got an empty parameter list. If all parameters of the model have "
            f"requires_grad=False, call requires_grad_(True) of those to train before {optimizer} "
            "is made."
        )


def refuse_shared_memory(params: Iterable[Tensor]) -> None:
    """Raises ValueError if a trained parameter has elements in the memory of another element.

    Updates in place would then overwrite each other, and a copy (as ZeRO-3's partitions) would end
    the sharing in silence.
    """
    by_storage: dict[int, list[Tensor]] = {}
    for param in params:
        has_own = param.numel() and param.device.type != "meta" and not is_dtensor(param)
        if has_own and int8.find(param) is None:
            by_storage.setdefault(param.untyped_storage().data_ptr(), []).append(param)
    for sharing in by_storage.values():
        if any(p.requires_grad for p in sharing) and _overlap(sharing):
            shapes = ", ".join(str(list(p.shape)) for p in sharing)
            raise ValueError(
                f"parameters share memory with each other or within themselves (shapes {shapes}), "
                "as expand(), overlapping views and nn.Parameter(other) do. To tie weights, use "
                "one nn.Parameter in both modules; else give each its own memory: "
                "nn.Parameter(x.detach().clone())."
            )


def _overlap(params: list[Tensor]) -> bool:
    """Whether elements of ``params``, of one storage, have the same memory."""
    if len(params) == 1 and params[0].is_contiguous():
        return False
    ends = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in params)
    if all(p.is_contiguous() for p in params):
        return any(end > first for (_, end), (first, _) in itertools.pairwise(ends))
    size = params[0].untyped_storage().nbytes()
    used = torch.zeros(size, dtype=torch.uint8, device="cpu")
    for p in params:
        size, first = p.element_size(), p.data_ptr() - p.untyped_storage().data_ptr()
        used.as_strided((*p.shape, size), (*(n * size for n in p.stride()), 1), first).fill_(1)
    return int(used.sum()) < sum(p.nbytes for p in params)


def refuse_complex(table: ParamTable, params: Iterable[Tensor]) -> None:
    """Raises ValueError if one of ``params`` is complex."""
    for param in params:
        if param.is_complex():
            raise ValueError(
                f"{type(table).__name__}: a parameter of shape {list(param.shape)} is "
                f"{param.dtype}, which no rule supports: make its real and imaginary parts "
                "the parameter (torch.view_as_real), or freeze it."
            )


def refuse_shape(table: ParamTable, param: Tensor, shard: Shard, known: str | None = None) -> None:
    """Raises ValueError if the rule of ``param`` cannot step its dtype, or ``shard``'s shape.

    ``known`` is its name, if the table has none.
    """
    refuse_complex(table, [param] if param.requires_grad else [])
    rule = table.hypers_of(table.group_of[param])
    entry = rules.entry_of(rule)
    is_stack = param in table.stacks
    if entry.has_sections:
        how = table.rule_of(param)
        sections.refuse(how, shard.shape[is_stack:], table.name(param))
        if sections.are_set(how) and shard.split is not None:
            raise ValueError(
                f"split and heads need ranks that hold whole rows of {table.name(param)}: shard "
                "only its first dimension, or remove the keys."
            )
    if is_stack and shard.split is not None:
        raise ValueError(
            f"a parameter of shape {list(shard.shape)} stacks experts, but ranks hold parts of "
            "experts: shard only its first dimension (Shard(0) of fully_shard), or distribute "
            "whole experts over ranks."
        )
    dims = len(shard.shape) - is_stack
    if not entry.any_shape and dims != 2:
        name, own = rule.__name__, type(table).__name__
        raise ValueError(
            f"{name} supports only matrices, but {known or table.name(param)} has the shape "
            f"{list(shard.shape)}. Create the groups with ds_ext.{own}.for_model(model, ...), or "
            f'put the parameter into a group with "type": "{entry.others}".'
        )


def stepped_alike(table: ParamTable) -> Iterator[str]:
    """Yields a warning if a rule for linear layers steps vectors, because it got no model."""
    name = type(table).__name__
    entry = rules.REGISTRY.get(name.lower())
    if entry is None or not entry.roles:  # a subclass; a rule for all parameters
        return
    others = {k: v for k, v in entry.roles.get("other", {}).items() if k != "type"}
    vectors = [table.rule_of(p) for p in table.group_of if len(table.shard(p).shape) == 1]
    own = [rule for rule in vectors if type(rule).__name__ == entry.rule.__name__]
    if any(all(getattr(rule, key) != others[key] for key in others) for rule in own):
        yield (
            f"{name} steps all its parameters alike, also embeddings, the output head and vectors. "
            f"ds_ext.{name}.for_model(model, ...) steps those by keys or a type of their own."
        )


def refuse_saved_groups(table: ParamTable, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for saved param groups of another optimizer, or of other parameters."""
    sizes, saved = ([len(g["params"]) for g in x] for x in (table.param_groups, groups))
    if sizes != saved:
        raise ValueError(
            "the loaded state_dict does not match the parameter groups: its groups have "
            f"{saved} parameters, but the optimizer's groups have {sizes}."
        )
    kind = type(table).__name__
    for group, own in zip(groups, table.param_groups, strict=True):
        hypers = table.hypers_of(group)
        names = hyperparams.names(hypers)
        missing = [name for name in names if name not in group]
        if missing:
            raise ValueError(
                f"not a state of {kind}: a group has no {', '.join(missing)}. Load what "
                f"state_dict() of {kind} of ds_ext returned."
            )
        foreign = [name for name in group if name in names_of_all_rules().difference(names)]
        if foreign:
            raise ValueError(f"not a state of {kind}: a group has {', '.join(foreign)}.")
        here = table.hypers_of(own)
        if here is not hypers:
            raise ValueError(
                f"not a state of {kind} with these groups: a group was saved with "
                f"{hypers.__name__}, but here {here.__name__} steps it."
            )
