"""Parameters that an optimizer cannot step, and states that do not fit it: ValueError."""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_ext import hyperparams, rules
from ds_ext.distributed.wrapped import refuse_flat
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import State
from ds_ext.optimizer import expert_stacks

if TYPE_CHECKING:
    from ds_ext.optimizer.rule_optimizer import RuleOptimizer


def refuse_params(optimizer: "RuleOptimizer", params: Collection[Tensor]) -> None:
    """Raises ValueError for parameters of a new group that cannot be stepped."""
    refuse_flat(params)
    refuse_complex(optimizer, (p for p in params if p.requires_grad))
    if optimizer.fused is not None and any(p not in optimizer.fused.names for p in params):
        raise ValueError(
            "add_param_group, or an edit of param_groups, brings a parameter that is not part of "
            "the model that is stepped inside backward. Build the model with it, frozen if need be."
        )


def refuse_complex(optimizer: "RuleOptimizer", params: Iterable[Tensor]) -> None:
    """Raises ValueError if one of ``params``, which are to be stepped, is complex."""
    for param in params:
        if param.is_complex():
            raise ValueError(
                f"{type(optimizer).__name__}: a parameter of shape {list(param.shape)} is "
                f"{param.dtype}, which no rule is made for: make its real and imaginary parts "
                "the parameter (torch.view_as_real), or freeze it."
            )


def refuse_shape(optimizer: "RuleOptimizer", param: Tensor, shard: Shard) -> None:
    """Raises ValueError if the rule of ``param`` is not for what has the shape of ``shard``."""
    rule = optimizer.hypers_of(optimizer.group_of[param])
    entry = rules.entry_of(rule)
    if param in optimizer.stacks and shard.split is not None:
        raise ValueError(
            f"a parameter of shape {list(shard.shape)} stacks experts, and ranks hold boxes of "
            "these: cut the stack in its first dimension alone (Shard(0) of fully_shard), or "
            "spread whole experts over ranks."
        )
    dims = len(shard.shape) - (param in optimizer.stacks)
    if not entry.any_shape and dims != 2:
        name, own = rule.__name__, type(optimizer).__name__
        raise ValueError(
            f"{name} is for matrices, and a parameter has the shape {list(shard.shape)}. Let "
            f"ds_ext.{own}.for_model(model, ...) make the groups, or put it into one with "
            f'"type": "{entry.others}".'
        )


def refuse_states(
    optimizer: "RuleOptimizer", states: Mapping[Tensor, State], stacked: Container[Tensor]
) -> None:
    """Raises ValueError for a state of a stack that is not by expert, and the reverse."""
    for param, state in states.items():
        expert_stacks.check_state(type(optimizer).__name__, param, state, param in stacked)


def refuse_saved_groups(optimizer: "RuleOptimizer", groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for saved param groups of another optimizer, or of other parameters."""
    sizes, saved = ([len(g["params"]) for g in x] for x in (optimizer.param_groups, groups))
    if sizes != saved:
        raise ValueError(
            "the loaded state_dict has another number of parameter groups, or of parameters in "
            f"them: {saved}, where the optimizer has {sizes}."
        )
    kind = type(optimizer).__name__
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        hypers = optimizer.hypers_of(group)
        names = hyperparams.names(hypers)
        missing = [name for name in names if name not in group]
        if missing:
            raise ValueError(f"not a state of {kind}: a group has no {', '.join(missing)}.")
        foreign = [name for name in group if name in _known_hypers().difference(names)]
        if foreign:
            raise ValueError(f"not a state of {kind}: a group has {', '.join(foreign)}.")
        here = optimizer.hypers_of(own)
        if here is not hypers:
            raise ValueError(
                f"not a state of {kind} with these groups: what {here.__name__} steps here, "
                f"{hypers.__name__} has stepped."
            )


def _known_hypers() -> set[str]:
    """The names of the hyper-parameters of all rules."""
    return {name for entry in rules.REGISTRY.values() for name in hyperparams.names(entry.rule)}
