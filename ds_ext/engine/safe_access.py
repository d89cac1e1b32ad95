"""Implements ``deepspeed.utils.safe_get_full_*`` and ``safe_set_full_*`` for ds_ext optimizers.

DeepSpeed's functions use attributes that its ZeRO optimizers set on parameters. ``attach`` sets
attributes that access a parameter's weight, kept gradient and state instead. All ranks must call
the functions for the same parameters in the same order. Under tensor parallelism the full tensor is
one rank's part of the matrix, as in DeepSpeed. The ``local`` functions are refused.

The attributes hold the engine and the parameter by weak references. Autograd holds parameters too,
for example if a module keeps its loss (``l_aux`` of ``deepspeed.moe``), and Python's garbage
collector does not see who holds an object in C++. It would never free what such a parameter holds.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.backward import int8_weights
from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.backward.module_hooks import Hook
from ds_ext.distributed import consensus
from ds_ext.distributed.groups import Group, explained
from ds_ext.distributed.placement import as_bytes
from ds_ext.engine.parameters import unpartitioned_shape
from ds_ext.engine.zero3 import Zero3Placement
from ds_ext.ops import int8
from ds_ext.ops.state import leaves, saved
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


class LocalPart(NamedTuple):
    """This rank's part of a weight, gradient or state."""

    name: str
    start: int  # index of its first element in the full tensor
    length: int  # elements
    shape: tuple[int, ...]  # of the full tensor
    group: Group  # ranks that hold the other parts; None: this part is the full tensor
    read: Callable[[], Tensor]  # returns a copy, [length] if it is only a part
    write: Callable[[Tensor], None]  # replaces the values by others, [length]

    def full(self, device: torch.device) -> Tensor:
        """Returns the full tensor, on all ranks. Parts of ranks may overlap."""
        values = self.read().reshape(-1)
        whole = torch.zeros(math.prod(self.shape), dtype=values.dtype, device=device)
        whole[self.start : self.start + self.length] = values
        if self.group is not None:
            with explained(), consensus.announced("safe_get_full_*", self.group):
                dist.all_reduce(as_bytes(whole), op=dist.ReduceOp.MAX, group=self.group)
        return whole.view(self.shape)

    def set_full(self, value: Tensor) -> None:
        """Writes this rank's part of the full tensor ``value``."""
        total = math.prod(self.shape)
        if value.numel() != total:
            raise ValueError(
                f"{self.name} has {total} elements, but the new value has {value.numel()}: pass "
                "the whole value on all ranks."
            )
        self.write(value.detach().reshape(-1)[self.start : self.start + self.length])


class Access:
    """Reads and writes weights, gradients and states, as full tensors.

    DeepSpeed defines the method names, and the argument order. Values are fp32, or fp64 for fp64
    parameters. ``optim_state_key`` selects a state: a path in the rule's state ("v.row"), or a name
    that torch or the authors use ("exp_avg_sq_row"). Without it, a method accesses the weight.
    Every getter returns None for a frozen parameter, as in DeepSpeed. Gradients are the mean over
    all ranks and micro-batches so far, without the loss scale.
    """

    def __init__(self, fused: FusedBackward) -> None:
        self.owner = weakref.ref(fused)

    @property
    def fused(self) -> FusedBackward:
        """The object that steps the parameter.

        Raises:
            RuntimeError: the engine was freed, or is inside ``ema()``.
        """
        fused = self.owner()
        if fused is None:
            raise RuntimeError("the engine of this parameter no longer exists: keep the engine.")
        fused.optimizer.refuse_exchanged()
        return fused

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # pickles of parameters contain None instead

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError: the functions for a rank's own partition are not supported."""
        raise AttributeError(
            f"ds_ext does not support {name}: use DeepSpeed's safe_get_full_* and safe_set_full_* "
            "functions, on all ranks."
        )

    def get_full_hp_param(self, param: Tensor, optim_state_key: str | None = None) -> Tensor | None:
        """Returns the full weight or state."""
        part = self._part(param, optim_state_key) if param.requires_grad else None
        return None if part is None else part.full(self.fused.layout.device)

    def set_full_hp_param(
        self, value: Tensor, param: Tensor, optim_state_key: str | None = None
    ) -> None:
        """Sets the weight or state. The next forward pass uses the new weight."""
        part = self._part(param, optim_state_key)
        if part is None:
            name = self.fused.layout.name(param)
            raise ValueError(f"{name} is not trained: it has no state to be set.")
        part.set_full(value)

    def get_fp32_grad_for_param(self, param: Tensor) -> Tensor | None:
        """Returns the full gradient; None if the parameter has none in this step."""
        part = self._gradient(param)
        return None if part is None else part.full(self.fused.layout.device)

    def set_fp32_grad_for_param(self, value: Tensor, param: Tensor) -> None:
        """Sets the gradient that ``engine.step()`` will use."""
        part = self._gradient(param)
        if part is None:
            name = self.fused.layout.name(param)
            raise RuntimeError(f"{name} has no gradient in this step, so it cannot be set.")
        part.set_full(value)

    def update_fp32_grad_for_param_vectorized(
        self, update: Callable[[Tensor, Tensor], Tensor], params: list[Tensor]
    ) -> None:
        """Replaces each parameter's gradient with ``update(gradient, param)``."""
        for param in params:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update(gradient, param), param)

    def _part(self, param: Tensor, key: str | None) -> LocalPart | None:
        return self._weight(param) if key is None else self._state(param, key)

    def _weight(self, param: Tensor) -> LocalPart:
        layout, optimizer = self.fused.layout, self.fused.optimizer
        shard = layout.shards[param]

        def read() -> Tensor:
            with int8.expanded([param]):
                values = optimizer.weights(param, layout.run(param), shard)
                return values.to(layout.device, _wide(values.dtype), copy=True)

        def write(values: Tensor) -> None:
            with int8_weights.expand_int8(param):
                optimizer.write_weights(param, layout.run(param), shard, values)
                layout.publish([param])
            layout.end_step()

        return self._run(param, read, write)

    def _gradient(self, param: Tensor) -> LocalPart | None:
        """The kept gradient; None if the parameter has none in this step.

        Raises RuntimeError if no gradients are kept.
        """
        fused = self.fused
        state, is_trained = fused.state, param in fused.optimizer.group_of and param.requires_grad
        if is_trained and not state.kept:
            raise RuntimeError(
                f"there is no gradient of {fused.layout.name(param)}: "
                + (
                    "the step has ended, or no backward pass came before it. Read gradients "
                    "between engine.backward(loss) and engine.step()."
                    if fused.grad_config.policy == "sharded"
                    else "ds_ext uses and frees gradients during backward. To read or set "
                    'gradients before engine.step(), set "ds_ext": {"gradient_policy": "sharded"} '
                    "in the config, which keeps this rank's part of each gradient."
                )
            )
        if param not in state.kept or not param.requires_grad:
            return None
        factor = fused.reader.unscale(fused.layout.placement_of[param])  # kept gradients are sums
        g = state.kept[param].g[: len(fused.layout.shards[param])]
        return self._run(
            param,
            lambda: g.to(_wide(g.dtype)) * factor,
            lambda values: state.replace(param, values.to(fused.layout.device) / factor),
        )

    def _run(
        self, param: Tensor, read: Callable[[], Tensor], write: Callable[[Tensor], None]
    ) -> LocalPart:
        """A part with a value for each element of this rank's run."""
        layout = self.fused.layout
        shard, placement = layout.shards[param], layout.placement_of[param]
        held = placement.tensor_parallel_shards.get(param)
        return LocalPart(
            layout.name(param),
            shard.start - (held.start if held else 0),
            len(shard),
            unpartitioned_shape(param),
            placement.group if placement.num_shards > 1 else None,
            read,
            write,
        )

    def _state(self, param: Tensor, key: str) -> LocalPart | None:
        """A state; None for a parameter that is not trained."""
        optimizer, layout = self.fused.optimizer, self.fused.layout
        name, shard = layout.name(param), layout.shards[param]
        placement = layout.placement_of[param]
        if param not in optimizer.group_of:
            return None
        if placement.tensor_parallel_shards.get(param) is not None:
            raise RuntimeError(
                f"{name} is divided by tensor parallelism: read its state from a checkpoint."
            )
        spec = saved(optimizer.state_spec(param, shard, optimizer.rule_of(param)))
        parts = {".".join(keys): (keys, part) for keys, part in leaves(spec)}
        found = next((parts[k] for k in (key, *_NAMES.get(key, ())) if k in parts), None)
        if found is None:
            known = summary(parts) if parts else "nothing"
            raise ValueError(
                f"{type(optimizer).__name__} keeps no {key!r} of {name}; it keeps {known}."
            )
        values: Any = optimizer.state.get(param)
        if not values:
            raise RuntimeError(f"{name} has no state yet: it is made in its first step.")
        keys, part = found
        for inner in keys:
            values = values[inner]
        is_alike = not part.is_shared and part.total == shard.numel  # as many elements as a weight
        whole = tuple(values.shape) if part.is_shared else (part.total,)
        return LocalPart(
            f"{key} of {name}",
            part.start,
            values.numel(),
            unpartitioned_shape(param) if is_alike else whole,
            placement.group if placement.num_shards > 1 and not part.is_shared else None,
            values.clone,
            lambda new: values.copy_(new.view(values.shape)),
        )


def attach(fused: FusedBackward) -> None:
    """Sets the attributes that ``deepspeed.utils.safe_*`` use on an engine's parameters."""
    access = Access(fused)
    for param, placement in fused.layout.placement_of.items():
        if isinstance(placement, Zero3Placement):
            vars(param)["_z3_optimizer"] = access
        else:
            vars(param).update(_hp_mapping=access, **_bound(access, weakref.ref(param)))


def _bound(access: Access, of: Callable[[], Any]) -> dict[str, Hook]:
    """The methods that DeepSpeed calls without the parameter, which is ``of()``."""
    return {
        "get_full_hp_param": Hook(lambda *key: access.get_full_hp_param(of(), *key)),
        "set_full_hp_param": Hook(lambda x, *key: access.set_full_hp_param(x, of(), *key)),
        "get_full_hp_grad": Hook(lambda: access.get_fp32_grad_for_param(of())),
        "set_full_hp_grad": Hook(lambda x: access.set_fp32_grad_for_param(x, of())),
    }


def detach(fused: FusedBackward) -> None:
    """Removes the attributes that ``attach`` set, but keeps attributes of other engines."""
    for param in fused.layout.names:
        for name in ("_z3_optimizer", "_hp_mapping"):
            access = vars(param).get(name)
            if isinstance(access, Access) and access.owner() is fused:
                for each in (name, *_bound(access, lambda: None)):
                    vars(param).pop(each, None)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """fp32 for floating-point dtypes below 32 bits; other dtypes unchanged."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
