"""Hooks that give weights stored in 8 bits their bf16 values while their module computes.

A module's weights are expanded before its forward pass and freed after it. A hook on its output
expands them for backward, and they are freed when autograd has their gradient. A step expands the
weights of its bucket, updates them like any bf16 weight, and stores them again (``Stepper``).
``ops/int8.py`` has the format.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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


def store_int8(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Stores the large matrices of a bf16 model in int8, with a scale for each 256 elements.

    A module's weights exist in bf16 only while it computes. Optimizers of ds_ext that step inside
    backward update them with unbiased rounding. ``state_dict()`` has them in bf16, in the host's
    memory; ``load_state_dict`` stores what it loads. The model keeps in bf16: frozen weights,
    matrices with less than 65,536 elements or with a number of elements that 256 does not divide,
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
        raise ValueError(
            f"{SETTING}: the model has no trainable matrix with at least "
            f"{int8.MIN_NUMEL:,} elements, a multiple of {int8.SIZE}: do not use it."
        )
    to = None if device is None else torch.device(device)
    for param in users:
        int8.store(param, to)
    if to is not None:
        _move_others(model, users, to)
    handles: list[Any] = [p.register_post_accumulate_grad_hook(_release) for p in users]
    for module in dict.fromkeys(module for modules in users.values() for module in modules):
        handles += [
            module.register_forward_pre_hook(Hook(_expand)),
            module.register_forward_hook(Hook(_after_forward), always_call=True),
            module.register_state_dict_post_hook(Hook(_export)),
            module.register_load_state_dict_pre_hook(Hook(_before_load)),
            module.register_load_state_dict_post_hook(Hook(_after_load)),
        ]
    setattr(model, ATTRIBUTE, handles)


def restore_bf16(model: nn.Module) -> None:
    """Undoes ``store_int8``: the weights are in bf16 again."""
    for module in model.modules():
        for handle in vars(module).pop(ATTRIBUTE, ()):
            handle.remove()
    for param in filter(int8.find, model.parameters()):
        int8.restore(param)


@contextlib.contextmanager
def expand_int8(params: Tensor | Iterable[Tensor]) -> Iterator[None]:
    """A context in which weights have their bf16 values, which may be read and changed.

    When it ends, also by an exception, the weights are stored in 8 bits again, rounded to nearest.
    Other parameters stay as they are. If several ranks train the model, all must make the same
    changes. At ZeRO stage 3 it expands partitions; use ``deepspeed.zero.GatheredParameters``.

    Args:
        params: a parameter, or parameters.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    stored = {p: held for p in params if (held := int8.find(p))}
    freed = [p for p, held in stored.items() if held.is_freed]  # not by an outer context
    int8.expand(freed)
    try:
        yield
    finally:
        for param, held in stored.items():
            place = held.place(param)
            if place.data_ptr() != held.values.data_ptr():
                held.values.copy_(place.detach())  # ``param.data`` was assigned
            int8.update(param)
        int8.release(freed)


@contextlib.contextmanager
def codes_as_data(model: nn.Module) -> Iterator[None]:
    """A context in which the data of stored weights is their codes, as bf16 numbers [bytes / 2]."""
    found = {p: int8.find(p) for p in model.parameters()}
    stored = {p: held for p, held in found.items() if held and held.partition is None}
    for param, held in stored.items():
        param.data = held.stored.view(param.dtype)
    try:
        yield
    finally:
        for param, held in stored.items():
            param.data = held.absent


def is_stored(model: nn.Module) -> bool:
    """Returns whether ``store_int8`` has stored weights of a model, or of modules in it."""
    return any(ATTRIBUTE in vars(module) for module in model.modules())


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


def stored_params(optimizer: RuleOptimizer) -> list[Tensor]:
    """Returns an optimizer's parameters that are stored in 8 bits.

    Raises:
        ValueError: the optimizer's settings do not go with weights in 8 bits.
    """
    params = list(filter(int8.find, optimizer.group_of))
    for param in params:
        step_key(optimizer, param)
    return params


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
    return key(rule.seed + SECOND_ROUNDING, optimizer.number_of[param], step)


def _check(model: nn.Module) -> None:
    """Raises ValueError for a model whose weights cannot be stored in 8 bits."""
    refuse_wrapped(model)
    for name, param in model.named_parameters():
        if int8.find(param) is not None:
            raise ValueError(f"store_int8: {name} is stored in 8 bits already: call it once.")
        if is_dtensor(param):
            raise unsupported(f"{name} is a DTensor, and fully_shard (FSDP2) or tp_plan")
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
        # MultiheadAttention reads the weight of its out_proj without calling it.
        is_read = type(module).__name__ == "NonDynamicallyQuantizableLinear"
        for param in module.parameters(recurse=False):
            if is_read or next(module.children(), None) is not None:
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


def _own(module: nn.Module) -> list[Tensor]:
    return list(module.parameters(recurse=False))


def _expand(module: nn.Module, *_: object) -> None:
    int8.expand(_own(module))


def _after_forward(module: nn.Module, args: object, output: Any) -> None:
    """Frees the weights, and hooks the output so that backward finds them."""
    before_backward = _before_backward(_own(module))
    for x in tree_leaves(output):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(before_backward)
    int8.release(_own(module))


def _before_backward(params: list[Tensor]) -> Callable[[Tensor], None]:
    """A hook of a module's output. It runs before the nodes that read the module's weights."""

    def hook(grad: Tensor) -> None:
        for param in int8.expand(params):
            held = int8.find(param)
            assert held is not None
            held.in_backward = True

    return hook


def _release(param: Tensor) -> None:
    """The hook of a finished gradient: no node of this graph reads the weight any more."""
    int8.release([param], even_in_backward=True)


def _export(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    """Puts bf16 copies, in the host's memory, into a state dict."""
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        if (held := int8.find(param)) is not None and prefix + name in state_dict:
            state_dict[prefix + name] = held.decoded()


def _before_load(module: nn.Module, state_dict: object, prefix: str, meta: Any, *_: object) -> None:
    """Expands the weights that are going to be overwritten."""
    if meta.get("assign_to_params_buffers", False):
        raise ValueError("load_state_dict: weights stored in 8 bits do not support assign=True.")
    for param in _own(module):
        if held := int8.find(param):
            held.is_loading = held.is_freed
    int8.expand(_own(module))


def _after_load(module: nn.Module, _: object) -> None:
    """Stores the weights, unless somebody else has expanded them."""
    for param in _own(module):
        if (held := int8.find(param)) and held.is_loading:
            held.is_loading = False
            int8.update(param)
            int8.release([param])
