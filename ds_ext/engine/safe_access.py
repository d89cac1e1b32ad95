"""What ``deepspeed.utils.safe_get_*`` and ``safe_set_*`` read and write under an engine of ours.

These functions look for methods and attributes that DeepSpeed's own ZeRO optimizers put on
parameters; ``give`` puts there what leads to a parameter's run, its kept gradient and its state.
The ``full`` ones are collectives: all ranks call them for the same parameters in the same order.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_ext.backward.gradients import FusedBackward
from ds_ext.engine.state_access import StateAccess
from ds_ext.engine.wholes import Wholes
from ds_ext.engine.zero3 import Partitioned


class _Method:
    """A method of ``access`` as an attribute of one parameter, with which it is not saved."""

    def __init__(self, access: "Access", name: str, param: Tensor, place: int) -> None:
        self.access = access
        self.method = getattr(access, name)
        self.param = param
        self.place = place  # of the parameter among the method's arguments

    def __call__(self, *args: Any) -> Any:
        return self.method(*args[: self.place], self.param, *args[self.place :])

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Access:
    """Values, gradients and states of an engine's parameters, whole or this rank's part.

    Methods have the names, and those for ZeRO-3 the order of arguments, by which DeepSpeed calls
    them. Values are in fp32, or fp64 where the parameter is. ``optim_state_key`` names a state, as
    in ``StateAccess``, which says what it raises; without one it is the weight that is meant.
    Every getter returns None for a frozen parameter, as DeepSpeed's do.
    """

    def __init__(self, fused: FusedBackward) -> None:
        self.fused = fused
        self.layout = fused.layout
        self.optimizer = fused.optimizer
        self.wholes = Wholes(fused.layout)
        self.states = StateAccess(fused.layout, fused.optimizer)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # it is not saved with a parameter

    # Weights and states.

    def get_full_hp_param(self, param: Tensor, optim_state_key: str | None = None) -> Tensor | None:
        """Returns the whole weight or state; no state of a parameter that no optimizer has."""
        if not param.requires_grad:
            return None
        if optim_state_key is not None:
            return self.states.full(param, optim_state_key)
        return self.wholes.gather(param, self._weights(param))

    def set_full_hp_param(
        self, value: Tensor, param: Tensor, optim_state_key: str | None = None
    ) -> None:
        """Makes ``value`` the weight or state; a weight counts from the next forward pass on.

        Raises:
            ValueError: for a value of another size.
        """
        if optim_state_key is not None:
            self.states.set_full(param, optim_state_key, value)
        else:
            self._set_weights(param, self.wholes.cut(param, value))

    def get_local_fp32_param(
        self, param: Tensor, optim_state_key: str | None = None
    ) -> Tensor | None:
        """Returns this rank's partition of the weight or its state, as padded as DeepSpeed's."""
        if not param.requires_grad:
            return None
        if optim_state_key is not None:
            return self.states.local(param, optim_state_key)
        return self.wholes.pad(param, self._weights(param))

    def set_local_hp_param(
        self, value: Tensor, param: Tensor, optim_state_key: str | None = None
    ) -> None:
        """Makes ``value`` this rank's partition of the weight or state. All ranks call it together.

        Raises:
            ValueError: for a value of another size.
        """
        if optim_state_key is not None:
            self.states.set_local(param, optim_state_key, value)
        else:
            self._set_weights(param, self.wholes.unpad(param, value))

    def _weights(self, param: Tensor) -> Tensor:
        """This rank's run of the weight, on the device: [len(shard)] of its own memory."""
        run, shard = self.layout.run(param), self.layout.shard(param)
        values = self.optimizer.weights(param, run, shard)
        return values.to(self.layout.device, _wide(values.dtype), copy=True)

    def _set_weights(self, param: Tensor, run: Tensor) -> None:
        layout = self.layout
        self.optimizer.write_weights(param, layout.run(param), layout.shard(param), run)
        layout.publish([param])
        layout.end_step()

    # Gradients: the mean over all ranks and micro-batches so far, without the loss scale. All of
    # these raise RuntimeError where none is kept of any parameter.

    def get_fp32_grad_for_param(self, param: Tensor) -> Tensor | None:
        """Returns the whole mean gradient; None if the parameter has none."""
        run = self._gradient(param)
        return None if run is None else self.wholes.gather(param, run)

    def set_fp32_grad_for_param(self, value: Tensor, param: Tensor) -> None:
        """Makes ``value`` the gradient that ``engine.step()`` will use.

        Raises:
            RuntimeError: if the parameter got no gradient in this step.
            ValueError: for a value of another size.
        """
        self._set_gradient(param, self.wholes.cut(param, value))

    def get_local_fp32_grad_for_param(self, param: Tensor) -> Tensor | None:
        """Returns this rank's partition of the mean gradient; None if there is none."""
        run = self._gradient(param)
        return None if run is None else self.wholes.pad(param, run)

    def set_local_grad_for_param(self, value: Tensor, param: Tensor) -> None:
        """Makes ``value`` this rank's partition of the gradient that ``engine.step()`` will use.

        Raises:
            RuntimeError: if the parameter got no gradient in this step.
            ValueError: for a value of another size.
        """
        self._set_gradient(param, self.wholes.unpad(param, value))

    def update_fp32_grad_for_param_vectorized(
        self, update: Callable[[Tensor, Tensor], Tensor], params: list[Tensor]
    ) -> None:
        """Puts ``update(gradient, param)`` in the place of the gradients of ``params``."""
        for param in params:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update(gradient, param), param)

    def _check_gradients(self, param: Tensor) -> bool:
        """Whether a parameter has a gradient. RuntimeError where none is kept of any."""
        kept = self.fused.tally.kept
        if not kept and param in self.optimizer.group_of and param.requires_grad:
            raise RuntimeError(
                f"there is no gradient of {self.layout.name(param)}: "
                + (
                    "the step has ended, or no backward pass came before it. Read gradients "
                    "between engine.backward(loss) and engine.step()."
                    if self.fused.how.policy == "sharded"
                    else "they are used up inside backward. To read or set gradients before "
                    'engine.step(), put "ds_ext": {"gradient_policy": "sharded"} into the config, '
                    "which keeps this rank's part of each."
                )
            )
        return param in kept

    def _factor(self, param: Tensor) -> float:
        """What makes a kept gradient the mean gradient of the loss."""
        return self.fused.unscale(self.layout.of[param])

    def _gradient(self, param: Tensor) -> Tensor | None:
        """This rank's run of the mean gradient; None if the parameter has none."""
        if not param.requires_grad or not self._check_gradients(param):
            return None
        g = self.fused.tally.kept[param].g[: len(self.layout.shard(param))]
        return g.to(_wide(g.dtype)) * self._factor(param)

    def _set_gradient(self, param: Tensor, run: Tensor) -> None:
        if not self._check_gradients(param):
            raise RuntimeError(
                f"{self.layout.name(param)} got no gradient in this step: there is none to set."
            )
        self.fused.replace_kept(param, run.to(self.layout.device) / self._factor(param))


def give(fused: FusedBackward) -> None:
    """Puts on an engine's parameters what ``deepspeed.utils.safe_*`` look for."""
    access = Access(fused)
    for param, placement in fused.layout.of.items():
        found: dict[str, object] = {"_z3_optimizer": access}
        if not isinstance(placement, Partitioned):
            found = {
                "_hp_mapping": access,
                "get_full_hp_param": _Method(access, "get_full_hp_param", param, 0),
                "set_full_hp_param": _Method(access, "set_full_hp_param", param, 1),
                "get_full_hp_grad": _Method(access, "get_fp32_grad_for_param", param, 0),
                "set_full_hp_grad": _Method(access, "set_fp32_grad_for_param", param, 1),
            }
        for name, value in found.items():
            setattr(param, name, value)


def take(fused: FusedBackward) -> None:
    """Takes off what ``give`` has put there, but where another engine has put its own."""
    for param in fused.layout.names:
        for name, value in list(vars(param).items()):
            access = value.access if isinstance(value, _Method) else value
            if isinstance(access, Access) and access.fused is fused:
                delattr(param, name)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """fp32 for floating point values of fewer bits; others as they are."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
