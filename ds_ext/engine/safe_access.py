"""Implements ``deepspeed.utils.safe_get_*`` and ``safe_set_*`` for ds_ext optimizers.

DeepSpeed's functions use attributes that its ZeRO optimizers set on parameters. ``attach`` sets
attributes that access a parameter's run, kept gradient and state instead. The ``full`` functions
are collectives: all ranks must call them for the same parameters in the same order.

The attributes hold the engine and the parameter by weak references. Autograd holds parameters too,
for example if a module keeps its loss (``l_aux`` of ``deepspeed.moe``), and Python's garbage
collector does not see who holds an object in C++. It would never free what such a parameter holds.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_ext.backward import int8_weights
from ds_ext.backward.fused_backward import FusedBackward
from ds_ext.distributed.layout import Layout
from ds_ext.engine.full_tensors import FullTensors, StateAccess
from ds_ext.engine.zero3 import Zero3Placement
from ds_ext.ops import int8
from ds_ext.optimizer import RuleOptimizer


class _Method:
    """A method of ``access`` bound to a parameter. It is pickled as None."""

    def __init__(self, access: "Access", name: str, param: Tensor, place: int) -> None:
        self.access = access
        self.method = getattr(access, name)
        self.param = weakref.ref(param)
        self.place = place  # index of the parameter among the arguments

    def __call__(self, *args: Any) -> Any:
        return self.method(*args[: self.place], self.param(), *args[self.place :])

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Access:
    """Reads and writes weights, gradients and states, as full tensors or this rank's partition.

    DeepSpeed defines the method names, and the argument order of the ZeRO-3 methods. Values are
    fp32, or fp64 for fp64 parameters. ``optim_state_key`` selects a state; see ``StateAccess`` for
    errors. Without it, a method accesses the weight. Every getter returns None for a frozen
    parameter, as in DeepSpeed.
    """

    def __init__(self, fused: FusedBackward) -> None:
        self.owner = weakref.ref(fused)

    @property
    def fused(self) -> FusedBackward:
        """The object that steps the parameter. Raises RuntimeError if the engine was freed."""
        fused = self.owner()
        if fused is None:
            raise RuntimeError("the engine of this parameter no longer exists: keep the engine.")
        return fused

    @property
    def layout(self) -> Layout:
        """The layout of the engine's model."""
        return self.fused.layout

    @property
    def optimizer(self) -> RuleOptimizer:
        """The engine's optimizer. Raises RuntimeError inside ``ema()``."""
        self.fused.optimizer.refuse_exchanged()
        return self.fused.optimizer

    @property
    def full_tensors(self) -> FullTensors:
        """Converts between runs, full tensors and partitions."""
        return FullTensors(self.layout)

    @property
    def states(self) -> StateAccess:
        """Reads and writes the optimizer's states."""
        return StateAccess(self.layout, self.optimizer)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # pickles of parameters contain None instead

    # Weights and states.

    def get_full_hp_param(self, param: Tensor, optim_state_key: str | None = None) -> Tensor | None:
        """Returns the full weight or state; None if the parameter is frozen."""
        if not param.requires_grad:
            return None
        if optim_state_key is not None:
            return self.states.full(param, optim_state_key)
        return self.full_tensors.gather(param, self._weights(param))

    def set_full_hp_param(
        self, value: Tensor, param: Tensor, optim_state_key: str | None = None
    ) -> None:
        """Sets the weight or state. The next forward pass uses the new weight.

        Raises:
            ValueError: the value has the wrong size.
        """
        if optim_state_key is not None:
            self.states.set_full(param, optim_state_key, value)
        else:
            self._set_weights(param, self.full_tensors.cut(param, value))

    def get_local_fp32_param(
        self, param: Tensor, optim_state_key: str | None = None
    ) -> Tensor | None:
        """Returns this rank's partition of the weight or state, with DeepSpeed's padding."""
        if not param.requires_grad:
            return None
        if optim_state_key is not None:
            return self.states.local(param, optim_state_key)
        return self.full_tensors.pad(param, self._weights(param))

    def set_local_hp_param(
        self, value: Tensor, param: Tensor, optim_state_key: str | None = None
    ) -> None:
        """Sets this rank's partition of the weight or state. All ranks must call it.

        Raises:
            ValueError: the value has the wrong size.
        """
        if optim_state_key is not None:
            self.states.set_local(param, optim_state_key, value)
        else:
            self._set_weights(param, self.full_tensors.unpad(param, value))

    def _weights(self, param: Tensor) -> Tensor:
        """A copy of this rank's run of the weight, [len(shard)], on the device."""
        with int8.expanded([param]):
            run, shard = self.layout.run(param), self.layout.shard(param)
            values = self.optimizer.weights(param, run, shard)
            return values.to(self.layout.device, _wide(values.dtype), copy=True)

    def _set_weights(self, param: Tensor, run: Tensor) -> None:
        layout = self.layout
        with int8_weights.expand_int8(param):
            self.optimizer.write_weights(param, layout.run(param), layout.shard(param), run)
            layout.publish([param])
        layout.end_step()

    # Gradients: the mean over all ranks and micro-batches so far, without the loss scale. All
    # methods raise RuntimeError if no gradients are kept.

    def get_fp32_grad_for_param(self, param: Tensor) -> Tensor | None:
        """Returns the full mean gradient; None if the parameter has none."""
        run = self._gradient(param)
        return None if run is None else self.full_tensors.gather(param, run)

    def set_fp32_grad_for_param(self, value: Tensor, param: Tensor) -> None:
        """Sets the gradient that ``engine.step()`` will use.

        Raises:
            RuntimeError: the parameter has no gradient in this step.
            ValueError: the value has the wrong size.
        """
        self._set_gradient(param, self.full_tensors.cut(param, value))

    def get_local_fp32_grad_for_param(self, param: Tensor) -> Tensor | None:
        """Returns this rank's partition of the mean gradient; None if there is none."""
        run = self._gradient(param)
        return None if run is None else self.full_tensors.pad(param, run)

    def set_local_grad_for_param(self, value: Tensor, param: Tensor) -> None:
        """Sets this rank's partition of the gradient that ``engine.step()`` will use.

        Raises:
            RuntimeError: the parameter has no gradient in this step.
            ValueError: the value has the wrong size.
        """
        self._set_gradient(param, self.full_tensors.unpad(param, value))

    def update_fp32_grad_for_param_vectorized(
        self, update: Callable[[Tensor, Tensor], Tensor], params: list[Tensor]
    ) -> None:
        """Replaces each parameter's gradient with ``update(gradient, param)``."""
        for param in params:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update(gradient, param), param)

    def _check_gradients(self, param: Tensor) -> bool:
        """Whether a parameter has a kept gradient. Raises RuntimeError if none are kept."""
        kept, projected = self.fused.state.kept, self.fused.state.projected
        is_trained = param in self.optimizer.group_of and param.requires_grad
        if is_trained and (not kept or param in projected):
            raise RuntimeError(
                f"there is no gradient of {self.layout.name(param)}: "
                + (
                    "the step has ended, or no backward pass came before it. Read gradients "
                    "between engine.backward(loss) and engine.step()."
                    if self.fused.grad_config.policy == "sharded"
                    else "ds_ext uses and frees gradients during backward. To read or set "
                    'gradients before engine.step(), set "ds_ext": {"gradient_policy": "sharded"} '
                    "in the config, which keeps this rank's part of each gradient."
                )
            )
        return param in kept

    def _factor(self, param: Tensor) -> float:
        """The factor that turns a kept gradient into the mean gradient of the loss."""
        return self.fused.reader.unscale(self.layout.of[param])

    def _gradient(self, param: Tensor) -> Tensor | None:
        """This rank's run of the mean gradient; None if the parameter has none."""
        if not param.requires_grad or not self._check_gradients(param):
            return None
        g = self.fused.state.kept[param].g[: len(self.layout.shard(param))]
        return g.to(_wide(g.dtype)) * self._factor(param)

    def _set_gradient(self, param: Tensor, run: Tensor) -> None:
        if not self._check_gradients(param):
            raise RuntimeError(
                f"{self.layout.name(param)} has no gradient in this step, so it cannot be set."
            )
        self.fused.state.replace(param, run.to(self.layout.device) / self._factor(param))


def attach(fused: FusedBackward) -> None:
    """Sets the attributes that ``deepspeed.utils.safe_*`` use on an engine's parameters."""
    access = Access(fused)
    for param, placement in fused.layout.of.items():
        found: dict[str, object] = {"_z3_optimizer": access}
        if not isinstance(placement, Zero3Placement):
            found = {
                "_hp_mapping": access,
                "get_full_hp_param": _Method(access, "get_full_hp_param", param, 0),
                "set_full_hp_param": _Method(access, "set_full_hp_param", param, 1),
                "get_full_hp_grad": _Method(access, "get_fp32_grad_for_param", param, 0),
                "set_full_hp_grad": _Method(access, "set_fp32_grad_for_param", param, 1),
            }
        for name, value in found.items():
            setattr(param, name, value)


def detach(fused: FusedBackward) -> None:
    """Removes the attributes that ``attach`` set, but keeps attributes of other engines."""
    for param in fused.layout.names:
        for name, value in list(vars(param).items()):
            access = value.access if isinstance(value, _Method) else value
            if isinstance(access, Access) and access.owner() is fused:
                delattr(param, name)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """fp32 for floating-point dtypes below 32 bits; other dtypes unchanged."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
