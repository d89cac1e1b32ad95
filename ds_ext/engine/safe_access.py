"""What ``deepspeed.utils.safe_get_*`` and ``safe_set_*`` read and write under an engine of ours.

These functions look for methods and attributes that DeepSpeed's own ZeRO optimizers put on
parameters; ``give`` puts there what leads to a parameter's run, its kept gradient and its state.
The ``full`` ones are collectives: all ranks call them for the same parameters in the same order.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext import param_groups
from ds_ext.backward.gradients import FusedBackward
from ds_ext.distributed.lost import explained
from ds_ext.distributed.placement import as_bytes
from ds_ext.engine.autotp import unpartitioned_shape
from ds_ext.engine.layouts import Partitioned
from ds_ext.ops.state import Part, leaves

# Names that the authors' optimizers and torch's have for what a rule keeps.
_NAMES = {
    "exp_avg": ("m",),
    "exp_avg_sq": ("v", "v.full"),
    "exp_avg_sq_row": ("v.row",),
    "exp_avg_sq_col": ("v.col",),
    "exp_avg_res_row": ("r.row",),
    "exp_avg_res_col": ("r.col",),
}


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
    them. Values are in fp32, or fp64 where the parameter is.
    """

    def __init__(self, fused: FusedBackward) -> None:
        self.fused = fused
        self.layout = fused.layout
        self.optimizer = fused.optimizer

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # it is not saved with a parameter

    def get_full_hp_param(self, param: Tensor, optim_state_key: str | None = None) -> Tensor | None:
        """The whole weight or, by a key, its state: in its shape if it has as many elements."""
        if optim_state_key is not None:
            return self._full_state(param, optim_state_key)
        return self._gathered(param, self._weights(param))

    def set_full_hp_param(
        self, value: Tensor, param: Tensor, optim_state_key: str | None = None
    ) -> None:
        """Makes ``value`` the weight or state; a weight counts from the next forward pass on."""
        if optim_state_key is not None:
            self._set_state(param, optim_state_key, value, is_full=True)
        else:
            self._write(param, self._cut(param, value))

    def get_local_fp32_param(
        self, param: Tensor, optim_state_key: str | None = None
    ) -> Tensor | None:
        """This rank's partition of the weight or its state, as padded as DeepSpeed's."""
        if optim_state_key is None:
            return self._padded(param, self._weights(param))
        found = self._state(param, optim_state_key)
        if found is None:
            return None
        part, values = found
        whole = part.is_shared or part.total != self.layout.shard(param).numel
        return values.clone() if whole else self._padded(param, values)

    def set_local_hp_param(
        self, value: Tensor, param: Tensor, optim_state_key: str | None = None
    ) -> None:
        """The reverse of ``get_local_fp32_param``. All ranks call it together."""
        if optim_state_key is not None:
            self._set_state(param, optim_state_key, value, is_full=False)
        else:
            self._write(param, self._unpadded(param, value))

    def get_fp32_grad_for_param(self, param: Tensor) -> Tensor | None:
        """The mean gradient over all ranks and micro-batches so far, without the loss scale."""
        run = self._gradient(param)
        return None if run is None else self._gathered(param, run)

    def set_fp32_grad_for_param(self, value: Tensor, param: Tensor) -> None:
        """Makes ``value`` the gradient that ``engine.step()`` will use."""
        self._set_gradient(param, self._cut(param, value))

    def get_local_fp32_grad_for_param(self, param: Tensor) -> Tensor | None:
        """This rank's partition of ``get_fp32_grad_for_param``."""
        run = self._gradient(param)
        return None if run is None else self._padded(param, run)

    def set_local_grad_for_param(self, value: Tensor, param: Tensor) -> None:
        """The reverse of ``get_local_fp32_grad_for_param``."""
        self._set_gradient(param, self._unpadded(param, value))

    def update_fp32_grad_for_param_vectorized(
        self, update: Callable[[Tensor, Tensor], Tensor], params: list[Tensor]
    ) -> None:
        """Puts ``update(gradient, param)`` in the place of the gradients of ``params``."""
        for param in params:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update(gradient, param), param)

    def _span(self, param: Tensor) -> tuple[int, int]:
        """Where this rank's run starts in what it holds of a parameter; elements of that."""
        domain = self.layout.of[param]
        held = domain.held.get(param)
        shard = self.layout.shard(param)
        if held is None:
            return shard.start, shard.numel
        return shard.start - held.split.first(held.part), held.split.numel(held.part)

    def _weights(self, param: Tensor) -> Tensor:
        """This rank's run of the weight, on the device: [len(shard)] of its own memory."""
        run, shard = self.layout.run(param), self.layout.shard(param)
        values = self.optimizer.weights(param, run, shard)
        return values.to(self.layout.device, _wide(values.dtype), copy=True)

    def _write(self, param: Tensor, run: Tensor) -> None:
        layout = self.layout
        self.optimizer.write_weights(param, layout.run(param), layout.shard(param), run)
        layout.publish([param])
        layout.end_step()

    def _gathered(self, param: Tensor, run: Tensor) -> Tensor:
        start, numel = self._span(param)
        return self._assembled(param, run, start, numel).view(unpartitioned_shape(param))

    def _assembled(self, param: Tensor, run: Tensor, start: int, total: int) -> Tensor:
        """The ``total`` elements of which each rank has a run; runs may overlap -> [total]."""
        domain = self.layout.of[param]
        whole = torch.zeros(total, dtype=run.dtype, device=self.layout.device)
        whole[start : start + len(run)] = run
        if domain.parts > 1:
            with explained():
                dist.all_reduce(as_bytes(whole), op=dist.ReduceOp.MAX, group=domain.group)
        return whole

    def _cut(self, param: Tensor, value: Tensor) -> Tensor:
        """This rank's run of a whole value. Raises ValueError for one of another size."""
        start, numel = self._span(param)
        if value.numel() != numel:
            raise ValueError(
                f"{self.layout.name(param)} has {numel} elements, the value that is to be set has "
                f"{value.numel()}: give all ranks the whole value."
            )
        n = len(self.layout.shard(param))
        return value.detach().reshape(-1)[start : start + n]

    def _padded(self, param: Tensor, run: Tensor) -> Tensor:
        return torch.nn.functional.pad(run, (0, self.layout.shard(param).size - len(run)))

    def _unpadded(self, param: Tensor, value: Tensor) -> Tensor:
        shard = self.layout.shard(param)
        if value.numel() not in (len(shard), shard.size):
            raise ValueError(
                f"this rank has {len(shard)} elements of {self.layout.name(param)} ({shard.size} "
                f"with padding), the value that is to be set has {value.numel()}."
            )
        return value.detach().reshape(-1)[: len(shard)]

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
        if not self._check_gradients(param):
            return None
        g = self.fused.tally.kept[param].g[: len(self.layout.shard(param))]
        return g.to(_wide(g.dtype)) * self._factor(param)

    def _set_gradient(self, param: Tensor, run: Tensor) -> None:
        if not self._check_gradients(param):
            raise RuntimeError(
                f"{self.layout.name(param)} got no gradient in this step: there is none to set."
            )
        self.fused.replace_kept(param, run.to(self.layout.device) / self._factor(param))

    def _state(self, param: Tensor, key: str) -> tuple[Part, Tensor] | None:
        """Where this rank's part of a state lies in the whole, and its values.

        None for a parameter that is not trained. Raises ValueError for a key that its rule does
        not keep, and RuntimeError before the first step.
        """
        optimizer, name = self.optimizer, self.layout.name(param)
        if param not in optimizer.group_of:
            return None
        if self.layout.of[param].held.get(param) is not None:
            raise RuntimeError(
                f"{name} is divided by tensor parallelism: read its state from a checkpoint."
            )
        keeps = optimizer.keeps(param, self.layout.shard(param), optimizer.rule_of(param))
        parts = {".".join(keys): (keys, part) for keys, part in leaves(keeps)}
        found = [parts[k] for k in (key, *_NAMES.get(key, ())) if k in parts]
        if not found:
            known = param_groups.summary(parts) if parts else "nothing"
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

    def _full_state(self, param: Tensor, key: str) -> Tensor | None:
        found = self._state(param, key)
        if found is None:
            return None
        part, values = found
        values = values.to(self.layout.device)
        if part.is_shared:
            return values.clone()
        whole = self._assembled(param, values.reshape(-1), part.start, part.total)
        return (
            whole.view(unpartitioned_shape(param))
            if part.total == self.layout.shard(param).numel
            else whole
        )

    def _set_state(self, param: Tensor, key: str, value: Tensor, is_full: bool) -> None:
        found = self._state(param, key)
        name = self.layout.name(param)
        if found is None:
            raise ValueError(f"{name} is not trained: it has no state to be set.")
        part, values = found
        flat = value.detach().reshape(-1)
        if is_full and flat.numel() == part.total:
            flat = flat[part.start : part.stop]
        elif not is_full and flat.numel() == self.layout.shard(param).size:
            flat = flat[: values.numel()]
        if flat.numel() != values.numel():
            raise ValueError(
                f"{key} of {name}: the value that is to be set has {value.numel()} elements, "
                f"{part.total} in all and {values.numel()} on this rank are kept."
            )
        values.copy_(flat.view(values.shape))


def give(fused: FusedBackward) -> None:
    """Lets ``deepspeed.utils.safe_*`` find the parameters of an engine."""
    access = Access(fused)
    for param, domain in fused.layout.of.items():
        found: dict[str, object] = {"_z3_optimizer": access}
        if not isinstance(domain, Partitioned):
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
    """Undoes ``give``, but for parameters that another engine has taken over."""
    for param in fused.layout.names:
        for name, value in list(vars(param).items()):
            access = value.access if isinstance(value, _Method) else value
            if isinstance(access, Access) and access.fused is fused:
                delattr(param, name)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """fp32 for floating point values of fewer bits; others as they are."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
