"""Parameter groups made from names and modules: which weights decay, which GaLore projects."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn

from ds_ext.optimizer import expert_stacks
from ds_ext.optimizer.expert_stacks import Shape, plain_shape

Types: TypeAlias = tuple[type[nn.Module], ...]
Owned: TypeAlias = dict[Tensor, tuple[str, nn.Module]]  # a parameter's name, and whose it is

_TARGETS = "GaLoreAdamW: optimizer.params.target_modules"


def decay_groups(
    module: nn.Module,
    params: list[Tensor],
    weight_decay: float,
    shape: Callable[[Tensor], Shape] = plain_shape,
) -> list[dict[str, Any]]:
    """Splits a flat list of parameters into one group with weight decay and one without.

    Norms, biases and whatever else has fewer than two dimensions are not decayed; an expert has
    those of one of its stack.
    """
    owners, stacked = _owners(module), expert_stacks.find(module, shape)
    decayed = [
        p for p in params if p in owners and _dims(p, stacked, shape) >= 2 and _decays(*owners[p])
    ]
    chosen = set(decayed)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for p in params if p not in chosen], "weight_decay": 0.0},
    ]


def _owners(module: nn.Module) -> Owned:
    """The name of each parameter and the module it belongs to, the first of several."""
    owners: Owned = {}
    for prefix, owner in module.named_modules():
        for name, param in owner.named_parameters(prefix, recurse=False):
            owners.setdefault(param, (name, owner))
    return owners


def _decays(name: str, owner: nn.Module) -> bool:
    return "norm" not in type(owner).__name__.lower() and not name.endswith("bias")


def _dims(param: Tensor, stacked: set[Tensor], shape: Callable[[Tensor], Shape]) -> int:
    return len(shape(param)) - (param in stacked)


def galore_groups(
    module: nn.Module,
    groups: Iterable[Any],
    target_modules: Any = "all-linear",
    linears: Types = (nn.Linear,),
    embeddings: Types = (nn.Embedding,),
    shape: Callable[[Tensor], Shape] = plain_shape,
) -> list[dict[str, Any]]:
    """Splits parameters, or groups of them, into those that GaLore projects and the others.

    The others get ``rank`` None. ``target_modules`` is a regular expression or a list of them, of
    which one is found somewhere in the name of a matrix; a plain part of a name is one too.
    "all-linear" is the weight of every one of ``linears`` but the output head's
    (get_output_embeddings(), or named lm_head) and those shared with one of ``embeddings``, and
    the matrices of stacked experts.
    """
    given: list[dict[str, Any]] = []
    for entry in groups:
        if isinstance(entry, dict):
            given.append(entry)
        elif given:
            given[0]["params"].append(entry)
        else:
            given.append({"params": [entry]})
    owners, stacked = _owners(module), expert_stacks.find(module, shape)
    trained = [p for group in given for p in group["params"]]
    known = {p: owners[p] for p in trained if p in owners and _dims(p, stacked, shape) == 2}
    if target_modules == "all-linear":
        linear = _linear(known, linears) | stacked & known.keys()
        chosen = linear - _embeddings(module, embeddings)
        if not chosen:
            raise ValueError(
                f'{_TARGETS} is "all-linear", but no nn.Linear weight is trained: list names.'
            )
    else:
        chosen = _targets(known, target_modules)
    split = []
    for group in given:
        matched = [p for p in group["params"] if p in chosen]
        others = [p for p in group["params"] if p not in chosen]
        split += [{**group, "params": matched}, {**group, "params": others, "rank": None}]
    return [group for group in split if group["params"]]


def _linear(matrices: Owned, linears: Types) -> set[Tensor]:
    """The matrices of linear layers."""
    return {p for p, (_, owner) in matrices.items() if isinstance(owner, linears)}


def _targets(matrices: Owned, targets: Any) -> set[Tensor]:
    """The matrices that ``target_modules`` names; ValueError where it names none."""
    patterns = [targets] if isinstance(targets, str) else targets
    if not patterns or not isinstance(patterns, list | tuple) or "" in patterns:
        raise ValueError(
            f'{_TARGETS} is {targets!r}; allowed: "all-linear" or a list of (parts of) names.'
        )
    chosen = set()
    for pattern in patterns:
        try:
            found = {p for p, (name, _) in matrices.items() if _finds(pattern, name)}
        except (re.error, TypeError):
            raise ValueError(f"{_TARGETS}: {pattern!r} is not a regular expression.") from None
        if not found:
            known = summary(name for name, _ in matrices.values())
            raise ValueError(
                f"{_TARGETS}: {pattern!r} is in no trained matrix's name. Known: {known}."
            )
        chosen |= found
    return chosen


def _finds(pattern: str, name: str) -> bool:
    """Whether a pattern is found in the name of a parameter, or of its module (for "...$")."""
    return bool(re.search(pattern, name) or re.search(pattern, name.rpartition(".")[0]))


def _embeddings(module: nn.Module, embeddings: Types) -> set[Tensor]:
    """Weights of embeddings and of the output head."""
    spared = [m for m in module.modules() if isinstance(m, embeddings)]
    spared += [m for name, m in module.named_modules() if name.rpartition(".")[2] == "lm_head"]
    output_embeddings = getattr(module, "get_output_embeddings", None)
    if callable(output_embeddings):
        spared.append(output_embeddings())
    return {p for m in spared if m is not None for p in m.parameters()}


def summary(names: Iterable[str]) -> str:
    """Parameter names with their layer numbers left out: "layers.*.q_proj.weight (30), ..."."""
    counts = Counter(re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", name) for name in names)
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items()) or "none"
