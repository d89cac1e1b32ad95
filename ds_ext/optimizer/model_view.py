"""The owner and role of each parameter of a model, by which param groups are made."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from ds_ext import rates
from ds_ext.optimizer import expert_stacks
from ds_ext.optimizer.expert_stacks import Shape, plain_shape

Types: TypeAlias = tuple[type[nn.Module], ...]


@dataclass(frozen=True)
class ModelView:
    """Names, modules and roles of a model's parameters.

    Args:
        module: the model.
        linears: the classes of linear layers.
        embeddings: the classes of embeddings.
        shape: returns the shape of a whole parameter, which this process may hold a part of.
    """

    module: nn.Module
    linears: Types = (nn.Linear,)
    embeddings: Types = (nn.Embedding,)
    shape: Callable[[Tensor], Shape] = plain_shape

    @functools.cached_property
    def owners(self) -> dict[Tensor, tuple[str, nn.Module]]:
        """The name of each parameter and the module it belongs to; the first, if shared."""
        owners: dict[Tensor, tuple[str, nn.Module]] = {}
        for prefix, owner in self.module.named_modules():
            for name, param in owner.named_parameters(prefix, recurse=False):
                owners.setdefault(param, (name, owner))
        return owners

    @functools.cached_property
    def stacked(self) -> set[Tensor]:
        """The parameters that stack experts."""
        return expert_stacks.find(self.module, self.shape)

    def dims(self, param: Tensor) -> int:
        """Returns the dimensions of a parameter, or of one expert of a stack."""
        return len(self.shape(param)) - (param in self.stacked)

    def decays(self, param: Tensor) -> bool:
        """Returns whether a parameter has weight decay: not if it is a norm, bias or vector."""
        if param not in self.owners or self.dims(param) < 2:
            return False
        name, owner = self.owners[param]
        return "norm" not in type(owner).__name__.lower() and not name.endswith("bias")

    def role(self, param: Tensor) -> str:
        """Returns the role of a parameter.

        It is "linear" for the matrix of a linear layer or expert; "head" for the output's matrix,
        even if tied to an embedding; "embedding"; or "other".
        """
        if param not in self.owners or self.dims(param) != 2:
            return "other"
        if param in self._heads:
            return "head"
        if param in self._embeddings:
            return "embedding"
        is_linear = isinstance(self.owners[param][1], self.linears) or param in self.stacked
        return "linear" if is_linear else "other"

    @functools.cached_property
    def _embeddings(self) -> set[Tensor]:
        found = (m for m in self.module.modules() if isinstance(m, self.embeddings))
        return {p for m in found for p in m.parameters()}

    @functools.cached_property
    def _heads(self) -> set[Tensor]:
        named = self.module.named_modules()
        found = [m for name, m in named if name.rpartition(".")[2] == "lm_head"]
        output_embeddings = getattr(self.module, "get_output_embeddings", None)
        if callable(output_embeddings):
            found.append(output_embeddings())
        return {p for m in found if m is not None for p in m.parameters()}


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
