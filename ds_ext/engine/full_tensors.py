"""Converts between a rank's run, the full tensor, and DeepSpeed's padded partition.

Under tensor parallelism the full tensor is one rank's part of the matrix, as in DeepSpeed.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import as_bytes
from ds_ext.distributed.rank_failure import explained
from ds_ext.engine.parameters import unpartitioned_shape
from ds_ext.ops.state import Part, leaves, saved
from ds_ext.optimizer import RuleOptimizer
from ds_ext.optimizer.model_view import summary

# Names of states in ds_ext, by their names in torch and in the authors' optimizers.
_NAMES = {
    "exp_avg": ("m",),
    "exp_avg_sq": ("v", "v.full"),
    "exp_avg_sq_row": ("v.row",),
    "exp_avg_sq_col": ("v.col",),
    "exp_avg_res_row": ("r.row",),
    "exp_avg_res_col": ("r.col",),
}


class FullTensors:
    """Converts the runs of a layout to full tensors and padded partitions, and back.

    ``gather`` and ``assemble`` are collective operations of the ranks that share a parameter.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def gather(self, param: Tensor, run: Tensor) -> Tensor:
        """Returns the full tensor, in the parameter's shape, from each rank's [len(shard)] run."""
        start, numel = self._span(param)
        return self.assemble(param, run, start, numel).view(unpartitioned_shape(param))

    def assemble(self, param: Tensor, run: Tensor, start: int, total: int) -> Tensor:
        """Returns the runs of all ranks as one tensor, [total]. Runs may overlap.

        Args:
            param: the parameter. All ranks that share it must call this.
            run: this rank's elements, flat.
            start: the index of the run's first element in the result.
            total: the number of elements of the result.
        """
        placement = self.layout.of[param]
        whole = torch.zeros(total, dtype=run.dtype, device=self.layout.device)
        whole[start : start + len(run)] = run
        if placement.num_shards > 1:
            with explained():
                dist.all_reduce(as_bytes(whole), op=dist.ReduceOp.MAX, group=placement.group)
        return whole

    def cut(self, param: Tensor, value: Tensor) -> Tensor:
        """Returns this rank's run, [len(shard)], of a full tensor.

        Raises:
            ValueError: the value has the wrong size.
        """
        start, numel = self._span(param)
        if value.numel() != numel:
            raise ValueError(
                f"{self.layout.name(param)} has {numel} elements, but the new value has "
                f"{value.numel()}: pass the whole value on all ranks."
            )
        n = len(self.layout.shard(param))
        return value.detach().reshape(-1)[start : start + n]

    def pad(self, param: Tensor, run: Tensor) -> Tensor:
        """Returns a run, padded with zeros to the partition size that all ranks share."""
        return nn.functional.pad(run, (0, self.layout.shard(param).size - len(run)))

    def unpad(self, param: Tensor, value: Tensor) -> Tensor:
        """Returns the run, [len(shard)], of a partition that may be padded.

        Raises:
            ValueError: the value has the wrong size.
        """
        shard = self.layout.shard(param)
        if value.numel() not in (len(shard), shard.size):
            raise ValueError(
                f"this rank has {len(shard)} elements of {self.layout.name(param)} ({shard.size} "
                f"with padding), but the new value has {value.numel()}."
            )
        return value.detach().reshape(-1)[: len(shard)]

    def _span(self, param: Tensor) -> tuple[int, int]:
        """The start of this rank's run in the full tensor, and that tensor's number of elements."""
        held = self.layout.of[param].tensor_parallel_shards.get(param)
        shard = self.layout.shard(param)
        if held is None:
            return shard.start, shard.numel
        return shard.start - held.start, held.numel


class StateAccess:
    """Reads and writes optimizer states, as full tensors or as this rank's part.

    A key is a path in the rule's state ("v.row"), or a name that torch or the authors use
    ("exp_avg_sq_row"). Every method raises ValueError if the rule has no such state. It raises
    RuntimeError before the first step, and for parameters that tensor parallelism has split.
    """

    def __init__(self, layout: Layout, optimizer: RuleOptimizer) -> None:
        self.layout = layout
        self.optimizer = optimizer
        self.full_tensors = FullTensors(layout)

    def full(self, param: Tensor, key: str) -> Tensor | None:
        """Returns the full state, in the parameter's shape if it has as many elements.

        Returns None for a frozen parameter. If the state is sharded, this is a collective.
        """
        found = self._find(param, key)
        if found is None:
            return None
        part, values = found
        values = values.to(self.layout.device)
        if part.is_shared:
            return values.clone()
        whole = self.full_tensors.assemble(param, values.reshape(-1), part.start, part.total)
        is_alike = part.total == self.layout.shard(param).numel
        return whole.view(unpartitioned_shape(param)) if is_alike else whole

    def local(self, param: Tensor, key: str) -> Tensor | None:
        """Returns this rank's part of the state; None for a frozen parameter.

        If the state has as many elements as the weight, the part is padded like a partition.
        """
        found = self._find(param, key)
        if found is None:
            return None
        part, values = found
        is_alike = not part.is_shared and part.total == self.layout.shard(param).numel
        return self.full_tensors.pad(param, values) if is_alike else values.clone()

    def set_full(self, param: Tensor, key: str, value: Tensor) -> None:
        """Sets the state to ``value``, a full tensor that is equal on every rank.

        Raises:
            ValueError: the value has the wrong size, or the parameter is frozen.
        """
        part, _ = self._find_trained(param, key)
        flat = value.detach().reshape(-1)
        own = flat[part.start : part.stop] if flat.numel() == part.total else flat
        self._set(param, key, own, value)

    def set_local(self, param: Tensor, key: str, value: Tensor) -> None:
        """Sets this rank's part of the state to ``value``, which may be padded.

        Raises:
            ValueError: the value has the wrong size, or the parameter is frozen.
        """
        _, values = self._find_trained(param, key)
        flat = value.detach().reshape(-1)
        is_padded = flat.numel() == self.layout.shard(param).size
        self._set(param, key, flat[: values.numel()] if is_padded else flat, value)

    def _set(self, param: Tensor, key: str, own: Tensor, value: Tensor) -> None:
        """Sets this rank's part to ``own``, from ``value``. Raises ValueError for a wrong size."""
        part, values = self._find_trained(param, key)
        if own.numel() != values.numel():
            raise ValueError(
                f"{key} of {self.layout.name(param)}: the new value has {value.numel()} elements, "
                f"but the state has {part.total} in total and {values.numel()} on this rank."
            )
        values.copy_(own.view(values.shape))

    def _find_trained(self, param: Tensor, key: str) -> tuple[Part, Tensor]:
        """Calls ``_find``, but raises ValueError for a frozen parameter."""
        found = self._find(param, key)
        if found is None:
            name = self.layout.name(param)
            raise ValueError(f"{name} is not trained: it has no state to be set.")
        return found

    def _find(self, param: Tensor, key: str) -> tuple[Part, Tensor] | None:
        """The position and values of this rank's part of a state; None for a frozen parameter."""
        optimizer, name = self.optimizer, self.layout.name(param)
        if param not in optimizer.group_of:
            return None
        if self.layout.of[param].tensor_parallel_shards.get(param) is not None:
            raise RuntimeError(
                f"{name} is divided by tensor parallelism: read its state from a checkpoint."
            )
        keeps = optimizer.state_spec(param, self.layout.shard(param), optimizer.rule_of(param))
        parts = {".".join(keys): (keys, part) for keys, part in leaves(saved(keeps))}
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
