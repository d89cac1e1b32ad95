"""Hooks and buckets: gradients are taken from autograd, reduced, and delivered to a receiver.

A hook takes each gradient when autograd finishes it, and puts it into a bucket. A full bucket is
reduced in place: each rank's run of the summed gradient lies in the gradient's own memory. A
receiver then steps by these runs, measures or keeps them (receivers.py).
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from ds_ext.backward import owners, streams
from ds_ext.backward.module_hooks import Hook, check_leaf_inputs
from ds_ext.backward.owners import GradientOwner
from ds_ext.backward.partial_grads import ModuleCalls
from ds_ext.backward.reduced_grad import Receiver, ReducedGrad, add_up, has_other_users
from ds_ext.backward.reduction import Reducing, Reduction
from ds_ext.distributed.consensus import tell_error
from ds_ext.distributed.layout import Agreement, Layout
from ds_ext.logs import logger

# A bucket that is filled to less than this fraction takes one more parameter of any size. Without
# this rule, each normalization weight between two large matrices would get its own bucket.
MIN_FILL = 1 / 16
# A parameter of at most this fraction of a bucket waits for the end of backward, with others that
# are so small: a batch of a bucket's few vectors takes the host as long as one of its matrices.
SMALL = 1 / 2**12
# Events of ``Buckets.note``: an error has ended a pass, or a pass was dropped that had asked other
# ranks; a pass begins that measures the norm; the norm is read; an engine's step ends; a pass has
# kept gradients; a pass has stepped by them, or measured them; the optimizer's state was loaded.
LEFT, MEASURED, READ, ENDED, KEPT, USED, LOADED = range(7)


def has_room(elements: int, more: int, size: int) -> bool:
    """Returns whether a bucket with ``elements`` takes a parameter of ``more`` elements."""
    return elements + more <= size or elements < MIN_FILL * size


class Buckets:
    """Collects the gradients of ``module`` and delivers this rank's runs of them.

    A parameter whose gradient comes in parts (``partial_grads``) is delivered after backward.

    Args:
        module: the model.
        layout: of the model.
        size: the maximum elements of a bucket. A bucket below ``MIN_FILL`` accepts one larger
            parameter. Parameters without a gradient on other ranks may wait longer.
        comm_dtype: returns the dtype that a gradient is reduced in, None for its own.
        owner: the owner of the parameters. Gradients that it does not accept stay in ``grad``.
        overlap: reduces and steps a bucket while the next one fills. Where the host would have to
            wait for the reduction, the bucket is delivered when the next one is full.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        size: int,
        comm_dtype: Callable[[Tensor], torch.dtype | None],
        owner: GradientOwner,
        overlap: bool = False,
    ) -> None:
        self.layout, self.size, self.owner = layout, size, owner
        self.comm_dtype = comm_dtype
        self.has_followed = False  # edits of groups, since the last forward or backward pass began
        self.overlap = overlap
        uses_streams = overlap and layout.device.type in streams.WITH_STREAMS
        self.streams = streams.SideStreams(layout.device) if uses_streams else None
        self.sent: Reducing | None = None  # the bucket that is being reduced
        self.receiver: Receiver | None = None  # the receiver of this backward pass
        self.waiting: dict[Tensor, Tensor | None] = {}  # flat and padded; None: no gradient
        self.elements = 0  # that no exchange of ready gradients covers yet
        self.deferred: dict[Tensor, int] = {}  # those of them that wait for the end: see SMALL
        self.asked: Callable[[], Agreement] | None = None  # waits for their answer
        self.has_asked = False  # whether this pass has sent a question to other ranks
        self.history = 0  # a hash of events, in order: see ``note``
        # This rank's error. The next question raises it on all ranks, or what found it does later.
        self.error: Exception | None = None
        self.unread: Callable[[], Agreement] | None = None  # an answer to a pass that was dropped
        self.asks_ahead = self.streams is not None and not layout.agrees_at_once
        self.parts: dict[Tensor, ReducedGrad] = {}  # of parameters whose gradient comes in parts
        self.pass_of: dict[Tensor, int] = {}  # ``uses.passes`` when a gradient of this step came
        self.last_pass = -1  # the same of the last gradient
        leaves = layout.leaves(module)
        self.leaf_params = {p for params in leaves.values() for p in params}
        self.uses = ModuleCalls(module, leaves | layout.units(), layout.brings_gradients)
        placed = layout.placement_of.items()
        self.size_of = {p: placement.padded_numel(p) for p, placement in placed}
        self.counted = {p: placement.max_padded_numel(p) for p, placement in placed}
        self.reduction = Reduction(layout, self.streams, self.size_of, comm_dtype, self.leaf_params)
        self.trained: set[Tensor] = set()  # parameters that have been seen to be trainable
        self.untrained = layout.params  # the others
        self.hooks = [module.register_forward_pre_hook(Hook(self.attach)), *layout.hook()]
        for leaf, params in leaves.items():
            take_all = Hook(partial(self._take_all, params))
            self.hooks.append(leaf.register_full_backward_hook(take_all))
            self.hooks.append(leaf.register_forward_pre_hook(Hook(check_leaf_inputs)))
        may_be_trained = (p for p in layout.names if p.is_floating_point() or p.is_complex())
        self.hooks += (self._hooked(p) for p in may_be_trained if p not in self.leaf_params)
        # Parameters without a group. Their gradient stays in ``grad``.
        self.not_stepped: set[Tensor] = set()
        self._drop_gradients(layout.names)

    def _hooked(self, param: Tensor) -> torch.utils.hooks.RemovableHandle:
        """Hooks a parameter. A frozen one is hooked too, because it may be unfrozen later."""
        frozen = not param.requires_grad
        # Python's garbage collector does not see the hooks that torch holds, so a model that a hook
        # refers to would never be freed.
        buckets, take = weakref.ref(self), type(self).take

        def hook(param: Tensor) -> None:
            if (found := buckets()) is not None:
                take(found, param)

        with torch.inference_mode(param.is_inference()):  # torch unfreezes it there only
            if frozen:
                param.requires_grad_(True)  # otherwise torch does not hook it
            handle = param.register_post_accumulate_grad_hook(hook)
            if frozen:
                param.requires_grad_(False)
        return cast(torch.utils.hooks.RemovableHandle, handle)

    def _drop_gradients(self, params: Iterable[Tensor]) -> None:
        """Drops the ``grad`` of earlier backward passes, because torch would add to it."""
        left = [p for p in params if p.grad is not None]
        for param in left:
            param.grad = None
        if left and self.layout.rank == 0:
            logger.warning("gradients of earlier backward passes are dropped (%d)", len(left))

    def attach(self, *_: object) -> None:
        """Before a forward pass: takes up parameters that became trainable or got a group."""
        self.has_followed = False
        if self.not_stepped:
            self.owner.optimizer.follow_groups()
            taken_up = set(filter(self.owner.accepts, self.not_stepped))
            self.not_stepped -= taken_up
            self._drop_gradients(taken_up)
        new = [p for p in self.untrained if p.requires_grad]
        if not new:
            return
        for param in new:
            owners.claim(param, self.owner, self.layout.name(param))
        self.trained.update(new)
        self.untrained = [p for p in self.untrained if p not in self.trained]
        names = ", ".join(self.layout.name(p) for p in new if not self.owner.accepts(p))
        if names and self.layout.rank == 0:
            logger.warning("not given to this optimizer, so not stepped or reduced: %s", names)

    def remove(self) -> None:
        """Takes the hooks off the parameters and modules."""
        for hook in (*self.hooks, *self.uses.hooks):
            hook.remove()

    def holds(self) -> bool:
        """Returns whether gradients have come that are not delivered."""
        return bool(self.waiting or self.parts or self.sent)

    def take(self, param: Tensor) -> None:
        """The hook: moves a parameter's gradient into the bucket; ``grad`` may be None."""
        if not param.requires_grad:  # frozen since forward: torch leaves it alone, too
            return
        if torch.is_grad_enabled():  # it is not in hooks, unless by ``create_graph``
            with torch.no_grad():
                return self.take(param)
        if param not in self.trained:
            if owners.owner(param) not in (None, self.owner):
                return  # another model trains it
            self.attach()
        if not self.has_followed:
            self.owner.optimizer.follow_groups()
            self.has_followed = True
        grad, param.grad = param.grad, None
        if not self.owner.accepts(param):
            param.grad = grad
            self.not_stepped.add(param)
            return
        size = self.counted[param]
        if not size:
            return
        self.last_pass = self.uses.passes
        pass_before = self.pass_of.setdefault(param, self.last_pass)
        try:
            accepts_parts = self._find_receiver().accepts_parts
        except (RuntimeError, ValueError) as error:
            accepts_parts, self.error = True, error
        if not accepts_parts and pass_before != self.uses.passes:
            self.flush(second=param)
        if param not in self.waiting:
            if not has_room(self.elements, size, self.size):
                self.flush()
            self.elements += size
            if size <= SMALL * self.size:
                self.deferred[param] = size
            before = None
        else:
            before = self.waiting[param]  # of another checkpointed segment
        own = None if grad is None else self._own(param, grad)
        if before is not None:
            own = before if own is None else before + own
        self.waiting[param] = own
        del grad, own, before  # ``flush`` frees them
        if self.elements >= self.size:
            self.flush()

    def _take_all(self, params: list[Tensor], *_: object) -> None:
        """The hook of a leaf module, whose parameters are taken together, used or not."""
        for param in params:
            self.take(param)

    def _own(self, param: Tensor, grad: Tensor) -> Tensor:
        """A gradient, flat and padded to equal parts for all ranks, in writable memory."""
        placement = self.layout.placement_of[param]
        grad = placement.gradient(param, grad)
        # Autograd may pass a view of a gradient that other nodes still have to read.
        is_aliased = placement.is_summed and has_other_users(grad)
        flat = grad.view(-1) if grad.is_contiguous() else grad.reshape(-1)
        dtype = self.comm_dtype(param)
        flat = flat if dtype is None else flat.to(dtype)
        missing = self.size_of[param] - flat.numel()
        if missing:
            return nn.functional.pad(flat, (0, missing))
        if is_aliased and flat.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr():
            return flat.clone()
        return flat

    def flush(self, ended: bool = False, second: Tensor | None = None) -> bool:
        """Reduces the gradients that all ranks have, and starts the next exchange of ready ones.

        If ``asks_ahead`` is set and backward has not ``ended``, the next call reads the answer of
        this exchange. Otherwise this call reads the answer and reduces these gradients too.

        Returns:
            Whether backward has ended on all ranks.

        Raises:
            RuntimeError: on all ranks, if one of them has a ``second`` gradient of a parameter,
                from a later backward pass than the first one.
        """
        if self.unread is not None:
            self.unread()  # raises an error if other ranks are in another pass
            self.unread = None
        self._reduce_ready()
        elements = sum(self.deferred.values())
        if ended or elements >= MIN_FILL * self.size:
            self.deferred, elements = {}, 0
        sent = [p for p in self.waiting if p not in self.deferred]
        in_parts = self.uses.in_parts(sent)
        failed, self.error = self.error, None
        history = tell_error(self.history, failed) if failed else self.history
        # ZeRO-3 reads an answer at once if backward has ended.
        self.asked = self.layout.agree(sent, in_parts, ended or bool(failed), history, second)
        self.has_asked = True
        self.elements = elements
        is_read_now = ended or second is not None or not self.asks_ahead
        return is_read_now and self._reduce_ready()

    def _reduce_ready(self) -> bool:
        """Reduces gradients that the ranks agree on; returns whether backward ended on all."""
        asked, self.asked = self.asked, None
        if asked is None:
            return False
        agreed = asked()
        if agreed.second is not None:
            raise self.owner.state.second_gradient(agreed.second)
        for piece in self.pieces(agreed.ready):
            voted_params = self._find_receiver().voted_params(piece)
            grads = [self.waiting.pop(p, None) for p in piece]  # None: not on this rank
            reducing = self.reduction.begin(piece, grads, voted_params, agreed.in_parts)
            self._receive()
            self.sent = reducing
            if not (self.overlap and reducing.blocks):
                self._receive()
            if self.streams is not None:
                self.streams.make_room(streams.IN_FLIGHT - (self.sent is not None))
        return agreed.ended

    def _receive(self) -> None:
        """Waits for the bucket that is being reduced, and delivers it."""
        sent, self.sent = self.sent, None
        if sent is None:
            return
        with nullcontext() if self.streams is None else self.streams.stepping():
            grads = sent.arrived()
            receiver = self._find_receiver()
            if sent.in_parts and not receiver.accepts_parts:
                parts = [p for p in grads if p in sent.in_parts]  # in the order of all ranks
                add_up(self.parts, {p: grads.pop(p) for p in parts})
            if grads:
                receiver.receive(grads)
        if self.streams is not None:
            self.streams.hold(sent)

    @torch.no_grad()
    def finish(self) -> None:
        """Ends a backward pass: delivers gradients that wait on any rank, or came in parts."""
        while not self.flush(ended=True):
            pass
        self._receive()
        if self.parts:
            parts, self.parts = self.parts, {}
            self.sent = Reducing(lambda: parts, blocks=False, in_parts=set())
            self._receive()
        if self.receiver is not None:
            self.note(KEPT if self.receiver.accepts_parts else USED)
        self.has_asked = False
        self.abandon()

    def discard(self, params: Collection[Tensor]) -> None:
        """Drops undelivered gradients of ``params``."""
        self._reduce_ready()
        self._receive()
        for param in params:
            for held in (self.waiting, self.deferred, self.parts, self.pass_of):
                held.pop(param, None)

    def abandon(self) -> None:
        """Ends a backward pass, and drops its gradients without waiting for other ranks."""
        if self.streams is not None:  # the host does not wait
            self.streams.make_current_wait()
        if self.has_asked:  # and perhaps other ranks have asked more often
            self.leave_pass()
        self.sent, self.receiver, self.has_asked, self.has_followed = None, None, False, False
        self.asked, self.unread, self.error = None, self.asked or self.unread, None
        self.waiting, self.elements, self.parts = {}, 0, {}
        self.deferred, self.pass_of = {}, {}

    def leave_pass(self) -> None:
        """Notes that an error has ended this backward pass, perhaps not on all ranks."""
        self.note(LEFT)
        self.layout.has_failed = True

    def note(self, event: int) -> None:
        """Notes an event of all ranks. ``Layout.agree`` finds ranks whose events differ."""
        self.history = hash((self.history, event))

    def _find_receiver(self) -> Receiver:
        """The receiver of this pass, even if this rank has had no gradient in it."""
        if self.receiver is None:
            self.receiver = self.owner.make_receiver()
        return self.receiver

    def pieces(self, params: list[Tensor]) -> list[list[Tensor]]:
        """Divides parameters into buckets."""
        pieces: list[list[Tensor]] = []
        elements = 0
        for param in params:
            size = self.counted[param]
            if not pieces or not has_room(elements, size, self.size):
                pieces.append([])
                elements = 0
            pieces[-1].append(param)
            elements += size
        return pieces
