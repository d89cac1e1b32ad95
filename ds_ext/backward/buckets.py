"""Gradients on their way from autograd: hooks, buckets, reduce-scatter, delivery.

A hook takes each gradient as autograd finishes it and puts it in a bucket. A full bucket is
reduced in place, so that each rank's run of the summed gradient lies inside the gradient's own
memory, and these runs are delivered: to be stepped by, measured or kept (gradients.py).
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from types import MethodType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ds_ext import ops
from ds_ext.backward import owners
from ds_ext.backward.owners import Hook, Owner
from ds_ext.backward.reduction import Reduction
from ds_ext.backward.reentrant import Uses
from ds_ext.backward.runs import Receiver, Run, apart, has_other_users
from ds_ext.backward.streams import Beside
from ds_ext.distributed.layout import Layout
from ds_ext.logs import logger

# A bucket that holds less than this part of its size takes one more parameter of any size: norms,
# which lie between large matrices, would else be buckets of their own.
FEW = 1 / 16


class Sent(NamedTuple):
    """A bucket on its way."""

    arrived: Callable[[], dict[Tensor, Run]]  # waits for it
    in_parts: set[Tensor]  # parameters of which a further part may come


class Buckets:
    """Collects the gradients of ``module`` and delivers this rank's runs of them.

    With ``overlap`` a bucket is reduced while the next one fills, and delivered when that is full:
    neither backward nor the host waits for it, and two are in flight.
    At most ``size`` elements wait, or one parameter with a few small ones before it (``FEW``),
    beside those that other ranks have no gradient of. They are reduced in ``comm_dtype(param)``,
    None for their own.
    ``begin`` gives the receiver when the first gradient of a backward pass arrives. A parameter
    whose gradient comes in parts (``uses.py``) is delivered when backward has ended. ``look`` is
    called before the first gradient of a backward pass. Gradients that are then not ``wanted`` stay
    in ``grad``, where torch puts them.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        size: int,
        comm_dtype: Callable[[Tensor], torch.dtype | None],
        look: Callable[[], None],
        wanted: Callable[[Tensor], bool],
        begin: Callable[[], Receiver],
        owner: Owner,
        overlap: bool = False,
    ) -> None:
        self.layout = layout
        self.size = size
        self.comm_dtype = comm_dtype
        self.look = look
        self.has_looked = False  # since the last forward or backward pass began
        self.wanted = wanted
        self.begin = begin
        self.owner = owner
        self.overlap = overlap and (layout.is_shared or layout.device.type == "cuda")
        self.beside = Beside(layout.device, overlap)
        self.sent: Sent | None = None  # the bucket that is on its way
        self.receiver: Receiver | None = None  # the receiver of this backward pass
        self.waiting: dict[Tensor, Tensor | None] = {}  # flat, in equal parts; None: has none
        self.elements = 0  # of gradients that wait
        self.joining: dict[Tensor, Tensor] = {}  # gradients that autograd may have a part of
        self.aside: dict[Tensor, None] | None = None  # what is not to be taken yet
        self.parts: dict[Tensor, Run] = {}  # of parameters whose gradient comes in parts
        leaves = layout.leaves(module)
        self.together = {p for params in leaves.values() for p in params}
        self.uses = Uses(module, leaves | layout.units(), layout.brings_gradients)
        self.size_of = {p: placement.padded_numel(p) for p, placement in layout.of.items()}
        self.counted = {p: placement.max_padded_numel(p) for p, placement in layout.of.items()}
        self.reduction = Reduction(layout, self.beside, self.size_of, comm_dtype, self.together)
        self.trained: set[Tensor] = set()  # parameters that have been seen to be trainable
        self.hooks = [module.register_forward_pre_hook(Hook(self.attach)), *layout.hook()]
        for leaf, params in leaves.items():
            self.hooks.append(leaf.register_full_backward_hook(Hook(self._taker(params))))
            self.hooks.append(leaf.register_forward_pre_hook(Hook(check_inputs)))
        self.hooks += [self._hooked(p) for p in layout.names if may_be_trained(p)]
        self.left: set[Tensor] = set()  # parameters in no group, which were left their gradient
        self._drop_gradients(layout.names)

    def _hooked(self, param: Tensor) -> torch.utils.hooks.RemovableHandle:
        """Hooks a parameter, frozen or not: whenever it is unfrozen, its gradients are taken."""
        frozen = not param.requires_grad
        if frozen:
            param.requires_grad_(True)  # or torch hooks nothing
        take = _leave if param in self.together else _weakly(cast(MethodType, self.take))
        handle: torch.utils.hooks.RemovableHandle
        handle = param.register_post_accumulate_grad_hook(take)
        if frozen:
            param.requires_grad_(False)
        return handle

    def _drop_gradients(self, params: Iterable[Tensor]) -> None:
        """Drops what earlier backward passes left in ``grad``: torch would add to it."""
        left = [p for p in params if p.grad is not None]
        for param in left:
            param.grad = None
        if left and self.layout.rank == 0:
            logger.warning("gradients of earlier backward passes are dropped (%d)", len(left))

    def attach(self, *_: object) -> None:
        """Looks for parameters to be stepped from now on; called before each forward pass.

        They have become trainable, or were put into a group.
        """
        self.has_looked = False
        if self.left:
            self.look()
            taken_up = set(filter(self.wanted, self.left))
            self.left -= taken_up
            self._drop_gradients(taken_up)
        new = [p for p in self.layout.names if p.requires_grad and p not in self.trained]
        for param in new:
            owners.claim(param, self.owner, self.layout.name(param))
        self.trained.update(new)
        names = ", ".join(self.layout.name(p) for p in new if not self.wanted(p))
        if names and self.layout.rank == 0:
            logger.warning("trainable but not given to the optimizer, not updated: %s", names)

    def remove(self) -> None:
        """Takes the hooks off the parameters and modules."""
        for hook in (*self.hooks, *self.uses.hooks):
            hook.remove()

    def holds(self) -> bool:
        """Whether gradients have come that are not delivered."""
        return bool(self.waiting or self.joining or self.parts or self.sent)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[list[Tensor]]:
        """Leaves gradients that come within to their parameters, which it lists: they are parts."""
        outer, self.aside = self.aside, {}
        left: list[Tensor] = []
        try:
            yield left
        finally:
            left += self.aside
            self.aside = outer

    @torch.no_grad()
    def join(self, param: Tensor, grad: Tensor) -> None:
        """Adds a gradient to what autograd brings in this pass, which may be nothing."""
        self.joining[param] = self.joining[param] + grad if param in self.joining else grad

    @torch.no_grad()
    def take(self, param: Tensor) -> None:
        """Moves a parameter's gradient, which it may lack, into the bucket; the hook."""
        if self.aside is not None:
            self.aside[param] = None
            return
        if param not in self.trained:
            if owners.owner(param) not in (None, self.owner):
                return  # it is trained as a part of another model
            self.attach()
        if not self.has_looked:
            self.look()
            self.has_looked = True
        grad, param.grad = param.grad, None
        if param in self.joining:
            joining = self.joining.pop(param)
            grad = joining if grad is None else grad + joining
        if not self.wanted(param):
            param.grad = grad
            self.left.add(param)
            return
        size = self.counted[param]
        if not size:
            return
        self._find_receiver()
        if param not in self.waiting:
            if not self._has_room(self.elements, size):
                self.flush()
            self.waiting[param] = None
            self.elements += size
        if grad is not None:
            before, own = self.waiting[param], self._own(param, grad)
            # a further part comes from another checkpointed segment
            self.waiting[param] = own if before is None else before + own
        del grad
        if self.elements >= self.size:
            self.flush()

    def _taker(self, params: list[Tensor]) -> Callable[..., None]:
        """A hook for a module whose parameters are taken together, used or not."""

        def hook(*_: object) -> None:
            for param in params:
                if param.requires_grad:
                    self.take(param)

        return hook

    def _own(self, param: Tensor, grad: Tensor) -> Tensor:
        """A gradient, flat, in equal parts for all ranks, in memory that may be written to."""
        grad = self.layout.of[param].gradient(param, grad)
        # Autograd may hand out a view of a gradient that other nodes still wait to read.
        is_shared = self.layout.of[param].is_summed and has_other_users(grad)
        flat = grad.reshape(-1).to(self.comm_dtype(param) or grad.dtype)
        missing = self.size_of[param] - flat.numel()
        if missing:
            return nn.functional.pad(flat, (0, missing))
        is_view = flat.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
        return flat.clone() if is_shared and is_view else flat

    @torch.no_grad()
    def flush(self, ended: bool = False) -> bool:
        """Reduces what all ranks have and delivers it; -> whether no rank will bring more."""
        more = {p: self.uses.in_parts(p) for p in self.waiting}
        agreed = self.layout.agree(more, ended)
        for piece in self.pieces(agreed.ready):
            voters = self._find_receiver().voters(piece)
            sent = self.reduction.begin({p: self._removed(p) for p in piece}, voters)
            self._receive()
            self.sent = Sent(sent, agreed.in_parts)
            if not self.overlap:
                self._receive()
        return agreed.ended

    def _removed(self, param: Tensor) -> Tensor | None:
        """The gradient that waited, which then does no more; None if this rank has none."""
        if param in self.waiting:
            self.elements -= self.counted[param]
        return self.waiting.pop(param, None)

    def _receive(self) -> None:
        """Delivers the bucket that is on its way."""
        sent, self.sent = self.sent, None
        if sent is None:
            return
        with self.beside.work():
            runs = sent.arrived()
            if not runs:
                return
            receiver = self._find_receiver()
            if not receiver.adds_up:
                for param in [p for p in runs if p in sent.in_parts]:  # in the order of all ranks
                    self._hold(param, runs.pop(param))
            if runs:
                receiver.receive(runs)

    def finish(self) -> None:
        """Ends a backward pass: delivers what waits on any rank, and what came in parts."""
        for param in list(self.joining):
            self.take(param)
        while not self.flush(ended=True):
            pass
        self._receive()
        parts, self.parts = self.parts, {}
        if parts:
            with self.beside.work():
                self._find_receiver().receive(parts)
        self.receiver = None
        self.has_looked = False
        self.beside.join()

    def discard(self, params: Collection[Tensor] | None = None) -> None:
        """Drops gradients that are not delivered: of ``params``, or all and the pass with them."""
        if params is not None:
            self._receive()
            for param in params:
                self._removed(param)
                self.parts.pop(param, None)
                self.joining.pop(param, None)
            return
        if self.sent is not None:
            with self.beside.work():
                self.sent.arrived()  # its memory is written to until then
        self.uses.forget(now=self.receiver is not None)
        self.abandon()
        self.has_looked = False
        self.beside.join()

    def abandon(self) -> None:
        """Drops what came in a backward pass that has failed, and waits for no other rank.

        What is on its way is held by its collective until that is done.
        """
        self.sent = self.receiver = None
        self.waiting, self.elements, self.joining, self.parts = {}, 0, {}, {}

    def begin_with(self, receiver: Receiver) -> None:
        """Begins a backward pass whose runs ``receiver`` takes, without asking ``begin``."""
        self.receiver = receiver

    def _find_receiver(self) -> Receiver:
        """Who takes the runs of this pass, of which this rank may have had no gradient itself."""
        if self.receiver is None:
            self.receiver = self.begin()
        return self.receiver

    def pieces(self, params: list[Tensor]) -> list[list[Tensor]]:
        """Cuts what is ready into pieces of the size of buckets: this rank may lack some."""
        pieces: list[list[Tensor]] = []
        elements = 0
        for param in params:
            if not pieces or not self._has_room(elements, self.counted[param]):
                pieces.append([])
                elements = 0
            pieces[-1].append(param)
            elements += self.counted[param]
        return pieces

    def _has_room(self, elements: int, more: int) -> bool:
        """Whether a bucket of so many elements takes a parameter of ``more``."""
        return elements + more <= self.size or elements < FEW * self.size

    def _hold(self, param: Tensor, run: Run) -> None:
        if param in self.parts:
            self.parts[param] = self.parts[param].plus(run)
        else:
            self.parts[param] = apart(run, ops.accumulator(run.g.dtype))


def check_inputs(leaf: nn.Module, inputs: tuple[object, ...]) -> None:
    """Checks that the backward hook of a ZeRO-3 leaf module will find its parameters' gradients.

    Torch calls that hook when the gradients of the module's positional inputs are known. If none of
    these needs a gradient, it calls the hook before the gradients of the parameters exist.

    Raises:
        RuntimeError: no positional input needs a gradient, and a parameter does.
    """
    is_seen = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    if is_seen or not torch.is_grad_enabled():
        return
    if any(p.requires_grad for p in leaf.parameters()):
        raise RuntimeError(
            f"{type(leaf).__name__} is a leaf module of ZeRO-3 (set_z3_leaf_modules), and no "
            "positional argument of its forward needs a gradient: its parameters would not be "
            "trained. Pass a tensor that needs a gradient by position (for a model of Hugging Face "
            "call model.enable_input_require_grads()), call it under torch.no_grad(), or take it "
            "out by deepspeed.utils.unset_z3_leaf_modules."
        )


def may_be_trained(param: Tensor) -> bool:
    """Whether a parameter can have gradients at all, now or later."""
    return (param.is_floating_point() or param.is_complex()) and not param.is_inference()


def _weakly(method: MethodType) -> Callable[[Tensor], None]:
    """A hook of a parameter that keeps its object no longer than others do.

    Torch holds such hooks where Python's garbage collector does not see them: a model that one of
    them leads back to would never be freed.
    """
    owner, call = weakref.ref(method.__self__), method.__func__

    def hook(param: Tensor) -> None:
        found = owner()
        if found is not None:
            call(found, param)

    return hook


def _leave(param: Tensor) -> None:
    """The hook of a parameter whose module takes it."""
