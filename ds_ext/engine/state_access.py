"""What a rule keeps of a parameter, read and set by the names that its authors or torch gave it."""

from typing import Any

from torch import Tensor

from ds_ext.distributed.layout import Layout
from ds_ext.engine.autotp import unpartitioned_shape
from ds_ext.engine.wholes import Wholes
from ds_ext.ops.state import Part, leaves
from ds_ext.optimizer import RuleOptimizer
from ds_ext.optimizer.model_view import summary

# Names that the authors' optimizers and torch's have for what a rule keeps.
_NAMES = {
    "exp_avg": ("m",),
    "exp_avg_sq": ("v", "v.full"),
    "exp_avg_sq_row": ("v.row",),
    "exp_avg_sq_col": ("v.col",),
    "exp_avg_res_row": ("r.row",),
    "exp_avg_res_col": ("r.col",),
}


class StateAccess:
    """States of an engine's parameters, whole or this rank's part.

    Keys are paths into what the rule keeps ("v.row"), or the names of the authors and of torch
    ("exp_avg_sq_row"). Every method raises ValueError for a key that the rule does not keep, and
    RuntimeError before the first step and for parameters that tensor parallelism has divided.
    """

    def __init__(self, layout: Layout, optimizer: RuleOptimizer) -> None:
        self.layout = layout
        self.optimizer = optimizer
        self.wholes = Wholes(layout)

    def full(self, param: Tensor, key: str) -> Tensor | None:
        """Returns the whole state, in the parameter's shape if it has as many elements.

        None for a parameter that is not trained. A collective, unless all ranks keep the whole.
        """
        found = self._find(param, key)
        if found is None:
            return None
        part, values = found
        values = values.to(self.layout.device)
        if part.is_shared:
            return values.clone()
        whole = self.wholes.assemble(param, values.reshape(-1), part.start, part.total)
        is_alike = part.total == self.layout.shard(param).numel
        return whole.view(unpartitioned_shape(param)) if is_alike else whole

    def local(self, param: Tensor, key: str) -> Tensor | None:
        """Returns this rank's part, padded to DeepSpeed's partition if it is like the weight.

        None for a parameter that is not trained.
        """
        found = self._find(param, key)
        if found is None:
            return None
        part, values = found
        is_alike = not part.is_shared and part.total == self.layout.shard(param).numel
        return self.wholes.pad(param, values) if is_alike else values.clone()

    def set_full(self, param: Tensor, key: str, value: Tensor) -> None:
        """Makes ``value``, whole on every rank, the state.

        Raises:
            ValueError: for a value of another size, or a parameter that is not trained.
        """
        part, _ = self._find_trained(param, key)
        flat = value.detach().reshape(-1)
        own = flat[part.start : part.stop] if flat.numel() == part.total else flat
        self._set(param, key, own, value)

    def set_local(self, param: Tensor, key: str, value: Tensor) -> None:
        """Makes ``value``, with or without padding, this rank's part of the state.

        Raises:
            ValueError: for a value of another size, or a parameter that is not trained.
        """
        _, values = self._find_trained(param, key)
        flat = value.detach().reshape(-1)
        is_padded = flat.numel() == self.layout.shard(param).size
        self._set(param, key, flat[: values.numel()] if is_padded else flat, value)

    def _set(self, param: Tensor, key: str, own: Tensor, value: Tensor) -> None:
        """Sets this rank's part to ``own``, cut from ``value``. Raises ValueError for its size."""
        part, values = self._find_trained(param, key)
        if own.numel() != values.numel():
            raise ValueError(
                f"{key} of {self.layout.name(param)}: the value that is to be set has "
                f"{value.numel()} elements, {part.total} in all and {values.numel()} on this rank "
                "are kept."
            )
        values.copy_(own.view(values.shape))

    def _find_trained(self, param: Tensor, key: str) -> tuple[Part, Tensor]:
        """The same as ``_find``. Raises ValueError for a parameter that is not trained."""
        found = self._find(param, key)
        if found is None:
            name = self.layout.name(param)
            raise ValueError(f"{name} is not trained: it has no state to be set.")
        return found

    def _find(self, param: Tensor, key: str) -> tuple[Part, Tensor] | None:
        """Where this rank's part of a state lies in the whole, and its values; None untrained."""
        optimizer, name = self.optimizer, self.layout.name(param)
        if param not in optimizer.group_of:
            return None
        if self.layout.of[param].tensor_parallel_shards.get(param) is not None:
            raise RuntimeError(
                f"{name} is divided by tensor parallelism: read its state from a checkpoint."
            )
        keeps = optimizer.keeps(param, self.layout.shard(param), optimizer.rule_of(param))
        parts = {".".join(keys): (keys, part) for keys, part in leaves(keeps)}
        found = [parts[k] for k in (key, *_NAMES.get(key, ())) if k in parts]
        if not found:
            known = summary(parts) if parts else "nothing"
            raise ValueError(
                f"{type(optimizer).__name__} keeps no {key!r} of {name}; it keeps {known}."
            )
        if not optimizer.state.get(param):
            raise RuntimeError(f"{name} has no state yet: it is made in its first step.")
        keys, part = found[0]
        values: Any = optimizer.state[param]
        for inner in keys:
            values = values[inner]
        return part, values
