"""The norm prepass, a backward pass that only measures the norm, without side effects.

A checkpointed segment draws random numbers and updates buffers when backward runs it again, so both
are restored. A function that overwrites its saved tensors in backward raises an error. Fused losses
are such functions: they compute gradients in forward and multiply them in place in backward, by
kernels that version counters do not see. A second backward pass would multiply them again.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdRef

Digests: TypeAlias = dict[tuple[BackwardCFunction, str], Tensor]  # of what functions hold: []

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# DeepSpeed's of every linear at stage 3, which never writes to its saved tensors.
_HARMLESS = "LinearFunctionForZeroStage3"
_SMALL = 2**20  # bytes
_BLOCK = 2**22  # elements that a CPU casts to int64 at a time


def nodes(loss: Tensor) -> Iterator[Node]:
    """Yields each node of the graph of ``loss`` once."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node


class NormPrepass:
    """Undoes the side effects of a backward pass over a graph of ``module``, on ``device``."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.devices = [] if device.type == "cpu" else [device]
        self.seen = self._versions()
        self.changed: str | None = None  # a function that wrote to its saved tensors

    @contextlib.contextmanager
    def repeatable(self, loss: Tensor) -> Iterator[None]:
        """A context for a backward pass of ``loss``; restores random numbers and buffers.

        The pass can be repeated afterwards if ``changed`` is None.
        """
        of_python: list[Any] = [n for n in nodes(loss) if isinstance(n, BackwardCFunction)]
        functions = [node for node in of_python if _name(node) != _HARMLESS]
        before = _digests(functions, loss.device)
        kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for (owner, name), version in self._versions().items():
            x = owner._buffers[name]
            assert x is not None
            # Of large buffers, those that the forward pass wrote to. Kernels update the small ones
            # of norms without a change of the version counter.
            if x.nbytes <= _SMALL or version != self.seen.get((owner, name)):
                kept.append((owner, name, x, x.clone()))
        try:
            with torch.random.fork_rng(self.devices):
                yield
        finally:
            for owner, name, x, values in kept:
                owner._buffers[name] = x
                x.data.copy_(values)  # keeps its version, because the graph may hold it
            self.seen = self._versions()
        self.changed = _first_change(before, _digests(functions, loss.device))

    def _versions(self) -> dict[tuple[nn.Module, str], tuple[WeakIdRef, int]]:
        """Which tensor each buffer is, and its version counter."""
        return {
            (owner, name): (WeakIdRef(x), 0 if x.is_inference() else x._version)
            for owner in self.module.modules()
            for name, x in owner._buffers.items()
            if x is not None
        }


def _digests(functions: Iterable[BackwardCFunction], device: torch.device) -> Digests:
    """Digests of all tensors that functions written in Python hold, on ``device``."""
    return {
        (node, name): _digest(x).to(device)
        for node in functions
        for name, x in _held(node)
        if type(x) is Tensor and x.layout is torch.strided  # not a parameter
    }


def _held(node: BackwardCFunction) -> Iterator[tuple[str, Any]]:
    """Yields the names and values that a function has saved, as attributes or saved tensors.

    Skips tensors that hooks unpack again for each backward pass: checkpointed or offloaded ones.
    """
    for name, value in vars(node).items():
        values = value if isinstance(value, (list, tuple)) else [value]
        yield from ((f"{name}[{i}]", x) for i, x in enumerate(values))
    try:
        hooks = (getattr(x, "unpack_hook", None) for x in node._raw_saved_tensors)  # not in 2.6
        if not any(hooks):
            yield from ((f"saved_tensors[{i}]", x) for i, x in enumerate(node.saved_tensors))
    except RuntimeError:  # freed, or written to as autograd sees
        return


def _digest(x: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers, []."""
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    x, words = x.reshape(-1), 8 // x.itemsize
    if x.numel() % words == 0 and x.storage_offset() % words == 0:
        return x.view(torch.int64).sum()
    blocks = x.view(_BITS[x.itemsize]).split(_BLOCK)
    return torch.stack([block.sum(dtype=torch.int64) for block in blocks]).sum()


def _first_change(before: Digests, after: Digests) -> str | None:
    """The name of a function whose saved tensors have changed; None if there is none."""
    lost = [key for key in before if key not in after]
    there = [key for key in before if key in after]
    if there:
        then, now = (torch.stack([each[key] for key in there]) for each in (before, after))
        lost += [key for key, same in zip(there, (then == now).tolist(), strict=True) if not same]
    return _name(lost[0][0]) if lost else None


def _name(node: BackwardCFunction) -> str:
    """The name of a function, without the suffix that torch adds."""
    return type(node).__name__.removesuffix("Backward")
