"""The name, shape and role of each parameter of a model, by which param groups are made."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from ds_ext import rates
from ds_ext.optimizer import expert_stacks
from ds_ext.optimizer.expert_stacks import Shape, plain_shape

Types: TypeAlias = tuple[type[nn.Module], ...]


class ParamView(NamedTuple):
    """Properties of a parameter."""

    name: str  # in the model; the first one if it is shared
    is_trained: bool
    shape: Shape  # of the whole parameter, or of one expert of a stack
    decays: bool  # whether it has weight decay: not if it is a norm, bias or vector
    # "linear" for the matrix of a linear layer or expert; "head" for the output's matrix, even if
    # tied to an embedding; "embedding"; or "other".
    role: str


ModelView: TypeAlias = Mapping[Tensor, ParamView]


def model_view(
    module: nn.Module,
    linears: Types = (nn.Linear,),
    embeddings: Types = (nn.Embedding,),
    shape: Callable[[Tensor], Shape] = plain_shape,
) -> dict[Tensor, ParamView]:
    """Returns the properties of a model's parameters, in the model's order.

    Args:
        module: the model.
        linears: the classes of linear layers.
        embeddings: the classes of embeddings.
        shape: returns the shape of a whole parameter, which this process may hold a part of.
    """
    stacked = expert_stacks.find(module, shape)
    of_embeddings = _params(m for m in module.modules() if isinstance(m, embeddings))
    heads = [m for name, m in module.named_modules() if name.rpartition(".")[2] == "lm_head"]
    output_embeddings = getattr(module, "get_output_embeddings", None)
    if callable(output_embeddings):
        heads.append(output_embeddings())
    of_heads = _params(m for m in heads if m is not None)
    found: dict[Tensor, ParamView] = {}
    for prefix, owner in module.named_modules():
        is_norm = "norm" in type(owner).__name__.lower()
        for name, p in owner.named_parameters(prefix, recurse=False):
            own, role = shape(p)[p in stacked :], "other"
            if len(own) == 2:
                if p in of_heads:
                    role = "head"
                elif p in of_embeddings:
                    role = "embedding"
                elif isinstance(owner, linears) or p in stacked:
                    role = "linear"
            decays = len(own) > 1 and not is_norm and not name.endswith("bias")
            found.setdefault(p, ParamView(name, p.requires_grad, own, decays, role))
    return found


def _params(modules: Iterable[nn.Module]) -> set[Tensor]:
    return {p for m in modules for p in m.parameters()}


def finds(pattern: str, name: str) -> bool:
    """Returns whether a pattern is found in a parameter's name, or its module's (for "...$").

    Raises:
        re.error, TypeError: it is no regular expression.
    """
    return bool(re.search(pattern, name) or re.search(pattern, name.rpartition(".")[0]))


def summary(names: Iterable[str]) -> str:
    """Returns names with "*" for layer numbers: "layers.*.q_proj.weight (30), ..."."""
    counts = Counter(re.sub(r"(^|(?<=\.))\d+(?=\.)", "*", name) for name in names)
    return ", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items()) or "none"


def at_zero(rule: str, names: Sequence[str], is_config: bool = True) -> str:
    """Returns the warning that a rule would hardly move the named matrices, which are zero."""
    is_lora = all("lora_" in name for name in names)
    match, kind = ("lora_", rates.LORA) if is_lora else (names[0], "adamw")
    lr = rates.shown(rates.RATES[kind].start)
    entry = f'[{{"match": "{match}", "type": "AdamW", "lr": {lr}}}]'
    groups = f"ds_ext.{rule}.for_model(model, param_groups={entry}, ...)"
    if is_config:
        groups = f'"param_groups": {entry} in optimizer.params'
    return (
        f"{rule}'s steps are proportional to the weights, so these weights, which start at zero, "
        f"hardly move: {summary(names)}. Use another optimizer for them: {groups}."
    )
