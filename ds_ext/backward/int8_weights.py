"""Hooks that give weights stored in 8 bits their bf16 values while their module computes.

A module's weights are expanded before its forward pass and freed after it. What autograd saves of
them in between is replaced by their codes, which are expanded when backward asks for them. A step
expands the weights of its bucket, updates them like any bf16 weight, and stores them again
(``Stepper``). ``ops/int8.py`` has the format.
"""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ds_ext.backward import owners
from ds_ext.backward.module_hooks import Hook
from ds_ext.distributed.dtensors import is_dtensor
from ds_ext.distributed.unsupported_wrappers import refuse_wrapped
from ds_ext.ops import int8
from ds_ext.ops.rounding import key
from ds_ext.optimizer import RuleOptimizer

ATTRIBUTE = "_int8_weight_hooks"  # of a model: the handles of its hooks
# The first random bits of a step round to bf16. The second ones must be independent of them.
SECOND_ROUNDING = 2**32
SETTING = 'store_int8, or ds_ext.weight_storage = "int8"'
NO_MATRIX = (
    f"{SETTING}: the model has no trainable matrix with at least {int8.MIN_NUMEL:,} elements, a "
    f"multiple of {int8.SIZE}: do not use it."
)


def store_int8(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Stores the large matrices of a bf16 model in int8, with a scale for each 32 elements.

    A module's weights exist in bf16 only while it computes. Optimizers of ds_ext that step inside
    backward update them with unbiased rounding. ``state_dict()`` has them in bf16, in the host's
    memory; ``load_state_dict`` stores what it loads. The model keeps in bf16: frozen weights,
    matrices with less than 65,536 elements or with a number of elements that 32 does not divide,
    and weights of modules that contain other modules.

    Call it before ``fuse_into_backward`` or ``deepspeed.initialize``.

    Args:
        model: the model.
        device: where to move the model, one weight at a time, so that a GPU never holds the whole
            model in bf16; None: its weights stay where they are.

    Raises:
        ValueError: a trainable weight is not bf16, no weight can be stored, or the model is
            distributed or already owned by an engine or ``fuse_into_backward``.
    """
    _check(model)
    users = _users(model)
    if not users:
        raise ValueError(NO_MATRIX)
    to = None if device is None else torch.device(device)
    for param in users:
        int8.store(param, to)
    if to is not None:
        _move_others(model, users, to)
    handles: list[Any] = []
    for module in dict.fromkeys(module for modules in users.values() for module in modules):
        handles += [
            module.register_forward_pre_hook(Hook(_before_forward), prepend=True),
            module.register_forward_hook(Hook(_after_forward), always_call=True),
            module._register_state_dict_hook(Hook(_export)),
            module._register_load_state_dict_pre_hook(Hook(_before_load)),
        ]
    setattr(model, ATTRIBUTE, handles)


def restore_bf16(model: nn.Module) -> None:
    """Undoes ``store_int8``: the weights are in bf16 again."""
    for module in model.modules():
        for handle in vars(module).pop(ATTRIBUTE, ()):
            handle.remove()
    for param in filter(int8.find, model.parameters()):
        int8.restore(param)


def expand_int8(params: Tensor | Iterable[Tensor]) -> contextlib.AbstractContextManager[object]:
    """A context in which weights have their bf16 values, which may be read and changed.

    When it ends, also by an exception, the weights are stored in 8 bits again, rounded to nearest.
    Other parameters stay as they are. If several ranks train the model, all must make the same
    changes. At ZeRO stage 3 it expands partitions; use ``deepspeed.zero.GatheredParameters``.

    Args:
        params: a parameter, or parameters.
    """
    return int8.expanded([params] if isinstance(params, Tensor) else params, stores=True)


def codes_as_data(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which the data of stored weights is their codes, as bf16 numbers [bytes / 2]."""
    return int8.codes_as_data(filter(_is_whole, model.parameters()))


def is_stored(model: nn.Module) -> bool:
    """Returns whether ``store_int8`` has stored weights of a model, or of modules in it."""
    return any(map(_is_whole, model.parameters()))


def _is_whole(param: Tensor) -> bool:
    """Whether a parameter is stored in 8 bits, and ZeRO-3 has not divided it."""
    return (held := int8.find(param)) is not None and held.partition is None


def unsupported(feature: str, advice: str = "remove one of them") -> ValueError:
    """Returns the error for a ``feature`` that does not go with weights in 8 bits."""
    return ValueError(
        f'{feature} does not support weights that are stored in 8 bits ("ds_ext": '
        f'{{"weight_storage": "int8"}}, or store_int8): {advice}.'
    )


def check_dtype(name: str, param: Tensor) -> None:
    """Raises ValueError if a trainable parameter is not bf16."""
    if param.requires_grad and param.dtype != torch.bfloat16:
        raise ValueError(
            f"{name} is {param.dtype}: load the model in torch.bfloat16. Frozen weights, such as "
            "those under LoRA's adapters, are not stored in 8 bits."
        )


def refused_hypers(optimizer: RuleOptimizer, param: Tensor) -> ValueError | None:
    """Returns the error if a parameter's settings do not go with weights in 8 bits."""
    rule = optimizer.rule_of(param)
    for name, value, allowed in (
        ("weight_update", rule.weight_update, "stochastic"),
        ("ema_decay", rule.ema_decay, 0),
    ):
        if value != allowed:
            return unsupported(f"{name} = {value!r}", f"set it to {allowed!r}")
    return None


def step_key(optimizer: RuleOptimizer, param: Tensor) -> int:
    """Returns the key of the random bits by which a step stores a parameter.

    Raises:
        ValueError: the optimizer's settings do not go with weights in 8 bits.
    """
    if error := refused_hypers(optimizer, param):
        raise error
    rule = optimizer.rule_of(param)
    step = optimizer.state[param]["step"] if param in optimizer.state else 0
    return key(rule.seed + SECOND_ROUNDING, optimizer.number_of[param], step, dimension=0)


def _check(model: nn.Module) -> None:
    """Raises ValueError for a model whose weights cannot be stored in 8 bits."""
    refuse_wrapped(model)
    for name, param in model.named_parameters():
        if int8.find(param) is not None:
            raise ValueError(f"store_int8: {name} is stored in 8 bits already: call it once.")
        if is_dtensor(param):
            raise unsupported(f"{name} is a DTensor, and fully_shard (FSDP2) or tp_plan")
        if param.requires_grad and type(param) is not nn.Parameter:
            raise unsupported(f"{name} is a {type(param).__name__}, which")
        if owners.owner(param) is not None:
            raise ValueError(
                f"store_int8: {name} belongs to an engine or a fuse_into_backward call: call "
                "store_int8 before it."
            )
        check_dtype(f"{SETTING}: {name}", param)


def _users(model: nn.Module) -> dict[Tensor, list[nn.Module]]:
    """The weights to store, each with the modules that compute with it."""
    users: dict[Tensor, list[nn.Module]] = {}
    others: set[Tensor] = set()
    for module in model.modules():
        # MultiheadAttention reads the weight of its out_proj without calling it. Embeddings with
        # max_norm edit their weight when they are called.
        is_read = type(module).__name__ == "NonDynamicallyQuantizableLinear"
        is_edited = getattr(module, "max_norm", None) is not None
        for param in module.parameters(recurse=False):
            if is_read or is_edited or next(module.children(), None) is not None:
                others.add(param)
            elif param.requires_grad and int8.fits(param.shape):
                users.setdefault(param, []).append(module)
    return {param: modules for param, modules in users.items() if param not in others}


def _move_others(model: nn.Module, stored: Iterable[Tensor], device: torch.device) -> None:
    """Moves buffers, and parameters that are not ``stored``."""
    kept = set(stored)
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if param not in kept:
                param.data = param.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


# The hooks.


class _Running(threading.local):
    """The modules whose forward pass a thread runs, each with what ends the use of its weights."""

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, contextlib.ExitStack]] = []


_running = _Running()


def _before_forward(module: nn.Module, *_: object) -> None:
    """Expands the weights."""
    with contextlib.ExitStack() as stack:
        params = stack.enter_context(int8.expanded(module.parameters(recurse=False)))
        stack.enter_context(_codes_in_graph(params))
        _running.modules.append((module, stack.pop_all()))


def _after_forward(module: nn.Module, *_: object) -> None:
    """Frees the weights. Torch also calls it if a hook failed before ``_before_forward``."""
    if _running.modules and _running.modules[-1][0] is module:
        _running.modules.pop()[1].close()


def _codes_in_graph(params: Sequence[Tensor]) -> saved_tensors_hooks:
    """A context in which graphs save codes in place of expanded weights.

    Other tensors go to the hooks of the context around it, such as activation checkpointing.
    """
    by_memory = {p.untyped_storage().data_ptr(): p for p in params}

    def pack(x: Tensor) -> Any:
        memory = x.untyped_storage().data_ptr() if x.layout == torch.strided else 0
        param = by_memory.get(memory)
        if param is not None and x.dtype == param.dtype:
            return _SavedWeight(x, param)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            root = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
            with torch.enable_grad():
                return _Saved.apply(root, x)
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _SavedWeight):
            return saved.values()
        values: Tensor = saved.grad_fn.saved_tensors[0]
        return values

    return saved_tensors_hooks(pack, unpack)


class _Saved(torch.autograd.Function):
    """A node that only saves a tensor, by the hooks of the current context."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, x: Tensor) -> Tensor:
        """Saves ``x``."""
        ctx.save_for_backward(x)
        return root.detach()


class _SavedWeight:
    """A view of an expanded weight that a graph has saved without its values."""

    def __init__(self, x: Tensor, param: Tensor) -> None:
        self.param, self.version = param, param._version
        self.view = x.shape, x.stride(), x.storage_offset()

    def values(self) -> Tensor:
        """Returns the view, in new memory unless somebody holds the weight."""
        version = self.param._version
        if version != self.version:  # torch does not check it for hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a weight of shape {[*self.param.shape]} is at version "
                f"{version}; expected version {self.version} instead."
            )
        with int8.expanded([self.param]):
            return self.param.detach().as_strided(*self.view)


def _export(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    """Puts bf16 copies, in the host's memory, into a state dict."""
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        if prefix + name in state_dict and int8.find(param) is not None:
            state_dict[prefix + name] = int8.decoded(param)


def _before_load(state_dict: object, prefix: str, meta: Any, *_: object) -> None:
    """Refuses to replace parameters; ``copy_`` stores what is loaded."""
    if meta.get("assign_to_params_buffers", False):
        raise ValueError("load_state_dict: weights stored in 8 bits do not support assign=True.")
