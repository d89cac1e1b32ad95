"""The layout of a model whose parameters are DTensors, as made by ``fully_shard`` (FSDP2).

FSDP2 gathers the weights of a unit, a module that ``fully_shard`` was applied to, when the unit is
called. In backward it reduces the unit's gradients together, and calls the hooks of its sharded
parameters. So gradients arrive reduced, in one order on all ranks. Only this file reads FSDP2's
own objects, which are private in torch 2.13.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_ext.distributed import dtensors
from ds_ext.distributed.groups import Group, size_of
from ds_ext.distributed.layout import Layout


def uses_fsdp2(model: nn.Module) -> bool:
    """Returns whether some of a model's parameters are DTensors."""
    return any(map(dtensors.is_dtensor, model.parameters()))


class FSDP2Layout(Layout):
    """The layout of a model of DTensors.

    Args:
        module: the model.
        group: all its ranks.

    Raises:
        ValueError: a trained parameter is no DTensor, or its placements are not supported.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        for param, name in names.items():
            if param.requires_grad and not dtensors.is_dtensor(param):
                raise ValueError(
                    f"{name} is trained but is not a DTensor, unlike other parameters of the "
                    "model, so its gradient would not be averaged over the ranks. Apply "
                    "fully_shard to the layers and then to the whole model, without "
                    "ignored_params; or freeze the parameter."
                )
        made = dtensors.DTensorPlacementCache(size_of(group))
        cut = {p: name for p, name in names.items() if dtensors.is_dtensor(p)}
        super().__init__(group, cut, made.of)  # type: ignore[arg-type]
        self.everyone = group
        self.agrees_at_once = True  # torch has reduced all gradients
        self.voters = self.placements[0].statistics_group if self.is_uniform else group
        # FSDP2's groups of parameters that are gathered and reduced together, each once.
        modules: list[Any] = [m for m in module.modules() if hasattr(m, "_get_fsdp_state")]
        states = dict.fromkeys(m._get_fsdp_state() for m in modules)
        self.param_groups = [group for state in states for group in _groups_of(state)]
        _refuse_cut_twice(module, self.param_groups)

    def broadcast(self, module: nn.Module) -> None:
        """Does nothing, because each rank has its own part."""

    def own_leaves(self, params: set[Tensor]) -> set[Tensor]:
        """Returns sharded and gathered parameters; two gathered ones if tied after sharding."""
        held = (own for group in self.param_groups for own in group.fsdp_params)
        gathered = {
            own._unsharded_param
            for own in held
            if hasattr(own, "_unsharded_param") and _in_place(own) in params
        }
        return params | gathered

    def units(self) -> dict[nn.Module, list[Tensor]]:
        """Returns FSDP2's units, and the parameters of each."""
        found: dict[nn.Module, list[Tensor]] = {}
        for group in self.param_groups:
            owners = {_in_place(own): own._module_info.module for own in group.fsdp_params}
            for module in group.modules:
                inside = {*module.modules()}
                own = [p for p, owner in owners.items() if owner in inside]
                found.setdefault(module, []).extend(own)
        return found

    def hook(self) -> list[RemovableHandle]:
        """Makes FSDP2 handle reentrant checkpointing that calls a unit again: ``_call_anew``."""
        modules = {module for group in self.param_groups for module in group.modules}
        return [m.register_forward_pre_hook(_call_anew, prepend=True) for m in modules]

    def brings_gradients(self) -> bool:
        """Returns whether FSDP2 will reduce gradients (``set_requires_gradient_sync``)."""
        return all(
            group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp)
            for group in self.param_groups
        )

    def has_kept(self) -> bool:
        """Returns whether FSDP2 holds gradients that it has not reduced over all ranks."""
        return any(
            group._partial_reduce_output is not None or any(map(_has_waiting, group.fsdp_params))
            for group in self.param_groups
        )

    def end_step(self) -> None:
        """Frees gathered weights, which FSDP2 may keep after a forward pass without backward."""
        for group in self.param_groups:
            group.reshard()


def _in_place(own: Any) -> Tensor:
    """The module's parameter of an FSDP2 parameter: another one if weights were tied later."""
    here = own._module_info.module._parameters.get(own._module_info.param_name)
    param: Tensor = here if here is not None and dtensors.is_dtensor(here) else own.sharded_param
    return param


def _refuse_cut_twice(model: nn.Module, param_groups: Iterable[Any]) -> None:
    """Raises ValueError for padded weights that were tied after FSDP2 had sharded both.

    FSDP2 uses the tied parameter for both. If it pads shards, it copies them, and one of the two
    copies would keep old values.
    """
    names = {module: name for name, module in model.named_modules()}
    seen: dict[Tensor, str] = {}
    for own in (own for group in param_groups for own in group.fsdp_params):
        param, ranks = _in_place(own), own.mesh_info.shard_mesh_size
        name = f"{names.get(own._module_info.module)}.{own._module_info.param_name}"
        other = seen.setdefault(param, name)
        is_padded = own.padded_sharded_param_size.numel() * ranks != own._orig_size.numel()
        if other != name and is_padded:
            raise ValueError(
                f"{name} is tied to {other}, and fully_shard has sharded both. Their rows do not "
                f"divide evenly over {ranks} ranks, so FSDP2 would keep old values of one. Pad the "
                "vocabulary (model.resize_token_embeddings(pad_to_multiple_of=...)), untie them "
                "(tie_word_embeddings=False), or shard them together: fully_shard([one, other])."
            )


def _groups_of(state: Any) -> Sequence[Any]:
    """The groups of an FSDP2 unit, of which torch before 2.12 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _call_anew(module: Any, *_: object) -> None:
    """The hook of a unit: makes FSDP2 treat a call in backward as a new call.

    A segment of reentrant checkpointing runs forward with gradients in backward. Once FSDP2 has
    reduced a unit's gradients, it treats any call in the same pass as a repetition of an earlier
    one. It would not reduce the segment's gradients, and would keep the unit's old gathered
    weights for the next forward pass.
    """
    if torch._C._current_graph_task_id() == -1 or not hasattr(module, "_get_fsdp_state"):
        return
    state = module._get_fsdp_state()
    groups = _groups_of(state)
    if groups and all(group._training_state.name == "POST_BACKWARD" for group in groups):
        state._training_state = type(state._training_state).IDLE


def _has_waiting(param: Any) -> bool:
    """Whether FSDP2 holds a gradient of a parameter that it has not reduced."""
    whole = getattr(param, "_unsharded_param", None)
    found = param.unsharded_accumulated_grad, getattr(whole, "grad", None)
    return any(grad is not None for grad in found)
