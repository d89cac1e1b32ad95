"""Wrappers of torch functions: zero_grad(), clip_grad_norm_, GradScaler, backward, retain_grad().

They handle parameters whose gradients are used inside backward, and call torch's function for all
others. Each is installed once, when a model is first stepped from hooks. A script may import
``clip_grad_norm_`` before that. The wrapper therefore replaces the inner function that it calls.
"""

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_ext.backward import error_texts, foreign_grads, owners
from ds_ext.backward.norm_prepass import nodes

_lock = threading.Lock()


def install_patches() -> None:
    """Installs the wrappers; further calls change nothing."""
    with _lock:
        _install_patches()


@functools.cache
def _install_patches() -> None:
    tensor: Any = torch.Tensor
    tensor.retain_grad = foreign_grads.recording(tensor.retain_grad)
    autograd: Any = torch.autograd
    backward = foreign_grads.preserving(autograd.backward)
    autograd.backward = _explaining(backward, ends_pass=True)
    autograd.grad = _explaining(autograd.grad, ends_pass=False)
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        function = getattr(nn.utils, name)
        cell = function.__closure__[function.__code__.co_freevars.index("func")]
        cell.cell_contents = _clipping(cell.cell_contents)
    scaler: Any = torch.amp.GradScaler
    scaler.scale = _scaling(scaler.scale)
    module: Any = nn.Module
    module.zero_grad = _discarding(module.zero_grad, lambda self: self.parameters())
    optimizer: Any = torch.optim.Optimizer
    optimizer.zero_grad = _discarding(
        optimizer.zero_grad,
        lambda self: (p for group in self.param_groups for p in group["params"]),
    )


def _discarding(
    zero_grad: Callable[..., None], params_of: Callable[[Any], Iterable[Tensor]]
) -> Callable[..., None]:
    @functools.wraps(zero_grad)
    def call(self: Any, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        found: dict[owners.GradientOwner, list[Tensor]] = {}
        for param in params_of(self):
            if (owner := owners.owner(param)) is not None:
                found.setdefault(owner, []).append(param)
        for owner, params in found.items():
            owner.discard(params)

    return call


def _clipping(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = [by for by in owners.of(params) if not by.trained.isdisjoint(params)]
        if not found:
            return clip(params, *args, **kwargs)
        by, trained = found[0], found[0].trained
        asked = inspect.signature(clip).bind(params, *args, **kwargs).arguments
        if len(found) > 1 or not (_step_clips(by, asked) and trained.issubset(params)):
            names, own = by.grad_config.setting_names, by.grad_config.max_norm
            is_set = f" ({names.clipping} is {own:g})" * bool(own)
            raise RuntimeError(
                f"torch.nn.utils.{clip.__name__.lstrip('_')}: ds_ext uses these gradients inside "
                f"backward, or keeps them for the step, so this call cannot clip them{is_set}. "
                f"Instead, set {names.clips}. The norm of all gradients is {names.norm}."
            )
        norm = by.norm_so_far()
        if by.layout.any(any(p.grad is not None for p in params if p not in trained)):
            raise RuntimeError(error_texts.CLIPPED_TOGETHER)
        if asked.get("error_if_nonfinite") and not math.isfinite(norm):
            raise RuntimeError(error_texts.NOT_FINITE)
        return torch.tensor(norm, dtype=torch.float64, device=by.layout.device)

    return call


def _step_clips(by: owners.GradientOwner, asked: Mapping[str, Any]) -> bool:
    """Whether the step of ``by`` clips by the norm that a call of ``clip_grad_norm_`` asks for."""
    max_norm = float(asked.get("max_norm", math.nan))
    is_same = max_norm == math.inf or 0 < max_norm == by.grad_config.max_norm
    return is_same and float(asked.get("norm_type", 2)) == 2 and "total_norm" not in asked


def _scaling(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def call(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if self.is_enabled() and _owners(outputs):
            raise RuntimeError(
                "torch.amp.GradScaler: ds_ext uses gradients of this loss inside backward, before "
                "scaler.step() could unscale them. Use bfloat16, which needs no scale: "
                "torch.autocast(dtype=torch.bfloat16). For float16, use deepspeed.initialize with "
                '"fp16" or "torch_autocast" in its config, which scales the loss.'
            )
        return scale(self, outputs)

    return call


def _owners(roots: Any) -> list[owners.GradientOwner]:
    """The owners whose hooks step parameters of the graph of ``roots``."""
    tensors = [x for x in tree_leaves(roots) if isinstance(x, Tensor)]
    leaves = (getattr(node, "variable", None) for x in tensors for node in nodes(x))
    return owners.stepping(leaf for leaf in leaves if leaf is not None)


def _explaining(run: Callable[..., Any], ends_pass: bool) -> Callable[..., Any]:
    """Explains torch's error that a tensor has changed, if weights of the graph were updated.

    Also counts the passes of each owner's thread. If it ``ends_pass``, tells the owners of the
    graph's parameters that an error has ended the backward pass.
    """

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_outermost = torch._C._current_graph_task_id() == -1
        updated = [by for by in owners.all_owners() if by.state.stepped] if is_outermost else []
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            reached = _owners((args, kwargs)) if is_outermost else []
            for by in owners.all_owners() if is_outermost and ends_pass else []:
                # A graph does not show the parameters of a reentrant checkpoint.
                has_taken = by.buckets.last_pass == by.uses.passes
                if by in reached or (has_taken and by.uses.thread == threading.get_ident()):
                    by.buckets.leave_pass()
            is_torchs = type(error) is RuntimeError and "second gradient" not in str(error)
            for by in reached if is_torchs else []:
                if by in updated:
                    text = error_texts.SECOND_BACKWARD.format(names=by.grad_config.setting_names)
                    raise RuntimeError(f"{text} The error was: {error}") from error
            raise
        finally:
            for by in owners.all_owners() if is_outermost else []:
                by.uses.passes += by.uses.thread == threading.get_ident()

    return call
