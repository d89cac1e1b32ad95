"""Rules for the matrices of linear layers, in one process: their authors' optimizers, and for all
other parameters those that a JSON config then takes."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from tests.common import low_rank
from tests.common.authors import ordinary

Group = dict[str, Any]
# By the rule that a config names: keys of the groups of other parameters, by their role.
OTHERS: dict[str, dict[str, Group]] = {
    "sinkgd": {"other": {"type": "flashadamw"}},
    "scale": {
        "other": {"type": "adamw"},
        "embedding": {"type": "scale", "norm_axis": "column"},
        "head": {"type": "scale", "momentum": 0.9},
    },
    "apollo": {"other": {"type": "adamw"}},
    "apollomini": {"other": {"type": "adamw"}},
    "muon": {"other": {"type": "adamw"}},
}
APOLLOS: dict[str, Group] = {
    "apollo": {"rank": 256, "scale": 1.0, "scale_type": "channel"},
    "apollomini": {"rank": 1, "scale": 128.0, "scale_type": "tensor"},
}


# Rules that are for matrices alone; the others step parameters of any shape.
MATRICES = tuple(name for name, entry in REGISTRY.items() if not entry.any_shape)


class Several(torch.optim.Optimizer):
    """Optimizers that step as one; a schedule of its groups is a schedule of theirs."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([p for group in groups for p in group["params"]], {"lr": 0.0})
        self.optimizers, self.param_groups = optimizers, groups

    def step(self, closure: None = None) -> None:
        theirs = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, own in zip(theirs, self.param_groups, strict=True):
            group["lr"] = own["lr"]  # accelerate loads the state once, which copies the groups
        for optimizer in self.optimizers:
            optimizer.step()


def optimizer(
    names: Mapping[Tensor, str], linear: str, streams: Mapping[str, int]
) -> Callable[[str, list[Group], Group], torch.optim.Optimizer]:
    """What makes the optimizer of a rule, groups and hyper-parameters, as ``ordinary`` does.

    ``linear`` is found in the ``names`` of matrices of linear layers, but for the head; ``streams``
    are those of APOLLO's random numbers, by name.
    """

    def role(p: Tensor) -> str:
        if re.search(linear, names[p]):
            return "linear"
        return next((r for r, part in ROLES if part in names[p]), "other")

    def make(rule: str, groups: list[Group], hypers: Group) -> torch.optim.Optimizer:
        others = OTHERS.get(rule, {})
        made = []
        for group in groups:
            by_role: dict[str, list[Tensor]] = {}
            for p in group["params"]:
                by_role.setdefault(role(p) if others else "linear", []).append(p)
            for r, params in by_role.items():
                one = {**group, "params": params}
                if r == "linear":
                    made.append(_of_matrices(rule, one, hypers))
                else:
                    keys = dict(others.get(r, others["other"]))
                    kind = keys.pop("type")
                    shared = hypers if kind == rule else {"lr": hypers["lr"]}
                    made.append(ordinary(kind, [one | keys], shared))
        return Several(made)

    def _of_matrices(rule: str, group: Group, hypers: Group) -> torch.optim.Optimizer:
        if rule == "muon":
            return low_rank.Muon([group], **{k: v for k, v in hypers.items() if k != "ns_dtype"})
        if rule not in APOLLOS:
            return ordinary(rule, [group], hypers)
        own = APOLLOS[rule] | {"gap": hypers.get("update_proj_gap", 200)}
        own |= {k: v for k, v in hypers.items() if k in ("lr", "rank")}
        drawn = {p: streams[names[p]] for p in group["params"] if p.requires_grad}
        return low_rank.APOLLO(drawn, weight_decay=group["weight_decay"], **own)

    return make


def made(rule: str, model: nn.Module, hypers: Mapping[str, Any]) -> torch.optim.Optimizer:
    """ds_ext's optimizer of a model, in which rules of matrices leave the rest to another rule."""
    kind = OPTIMIZERS[rule]
    if rule in MATRICES:
        return kind.for_model(model, **hypers)
    return kind(model.parameters(), **hypers)


Told = Mapping[str, Mapping[str, Any]]


def told(optimizer: Any, model: nn.Module) -> Told:
    """How ds_ext's optimizer steps a model: the group and the stream of each parameter, by name."""
    names = {p: n for n, p in model.named_parameters()}
    groups = {
        names[p]: (group.get("type"), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return {"groups": groups, "streams": streams_of(optimizer, names)}


def as_told(
    rule: str, hypers: Mapping[str, Any], said: Told, named: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """The authors' optimizer of each parameter in ``named``, in the groups that ``told`` returned.

    Rules of ``MATRICES`` leave what is no matrix of a linear layer to torch's AdamW.
    """
    own = OPTIMIZERS[rule].hypers(**hypers)
    given = {key: value for key, value in hypers.items() if key != "weight_decay"}
    each = []
    for n, (kind, lr, decay) in said["groups"].items():
        p = named[n]
        if kind == "AdamW":
            each.append(torch.optim.AdamW([p], lr=lr, weight_decay=decay))
        elif rule not in MATRICES:
            each.append(ordinary(rule, [{"params": [p], "weight_decay": decay}], given))
        elif rule == "muon":
            each.append(low_rank.Muon([p], lr=lr, weight_decay=decay))
        elif p.requires_grad:
            low = {"rank": own.rank, "scale": own.scale, "scale_type": own.scale_type}
            stream = {p: said["streams"].get(n, 0)}
            gap = own.update_proj_gap
            each.append(low_rank.APOLLO(stream, gap=gap, lr=lr, weight_decay=decay, **low))
    return Several(each)


# A name that says what a parameter is; a tied embedding is a head.
ROLES = (("head", "lm_head"), ("embedding", "embed"))


def streams_of(optimizer: Any, names: Mapping[Tensor, str]) -> dict[str, int]:
    """The streams that an optimizer of ds_ext keeps, by the names of its parameters."""
    kept = ((names[p], state) for p, state in optimizer.state.items())
    return {name: int(state["stream"]) for name, state in kept if "stream" in state}
