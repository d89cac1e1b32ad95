"""The step inside backward: from the hooks' gradients to updates, by one of two policies.

``fused`` steps a parameter as soon as its gradient is reduced, so that no gradient is kept; to
clip exactly, the graph is run backward twice, first only to measure the norm. ``sharded`` keeps
this rank's run of each gradient until the step, over any number of backward passes, and clips by
scaling it. A step that is measured or kept is all or nothing: a gradient that is not finite skips
it. Without, it skips its own parameter. Either way all ranks do alike.
"""

import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.backward import messages, owners, settings, sparing, torch_calls
from ds_ext.backward.buckets import Buckets
from ds_ext.backward.reading import GradientReader
from ds_ext.backward.receivers import Keeping, Measuring, Stepper, Stepping, SteppingMeasured
from ds_ext.backward.reentrant import Uses
from ds_ext.backward.rehearsal import Rehearsal
from ds_ext.backward.results import StepResult, measured
from ds_ext.backward.runs import Receiver, Run
from ds_ext.backward.tally import Clipping, Tally
from ds_ext.distributed import consensus
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement
from ds_ext.logs import logger
from ds_ext.optimizer import RuleOptimizer, fitting, meter, unfit


class FusedBackward:
    """Steps ``optimizer`` by the gradients of ``module``, on the runs that ``layout`` gives.

    ``comm_dtype`` gives the dtype that a parameter's gradient is reduced in, None for its own.
    ``is_boundary`` tells, during a backward pass, whether the step follows it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: RuleOptimizer,
        layout: Layout,
        how: settings.Gradients,
        comm_dtype: Callable[[Tensor], torch.dtype | None] = lambda param: None,
        is_boundary: Callable[[], bool] = lambda: True,
    ) -> None:
        if layout.is_part:  # others wait for this rank, and have other parameters
            consensus.together(lambda: _refuse_unfit(optimizer, layout), ValueError)
        else:
            _refuse_unfit(optimizer, layout)
        self.optimizer = optimizer
        optimizer.is_batched = not layout.any(not optimizer.is_batched)
        self.layout = layout
        self.how = how
        self.is_boundary = is_boundary
        self.reader = GradientReader(layout, how)
        self.stepper = Stepper(optimizer, layout, bool(how.max_value))
        self.clipping = Clipping(how.max_norm, how.clip_mode)
        self.tally = Tally(self.reader)
        self.norm: float | None = None  # of all gradients of the last step
        self.skipped = 0  # parameters not updated because of their gradient, in all steps
        self.skipped_steps = 0  # steps that updated nothing
        self.metrics: dict[str, float] = {}  # of the last step
        self.told_cost = False  # of gradients that are kept
        self.is_asked = False  # whether the next backward pass is of a loss of this model
        self.buckets = Buckets(
            module,
            layout,
            how.bucket_size,
            comm_dtype,
            look=optimizer.follow_groups,
            wanted=self._wanted,
            begin=self._begin,
            overlap=how.overlap,
            owner=self,
        )
        self.rehearsal = Rehearsal(module, layout.device)
        optimizer.fused = layout
        self.is_replaced = False  # whether another owner has taken the parameters over
        self.leave: Callable[[], None] = self.buckets.remove  # the model, to another owner
        # called when a step was dropped whole, and told whether gradients of it had come
        self.discarded: Callable[[bool], None] = lambda had_begun: None
        # called with a loss: a backward pass of it within will be run once more
        self.unseen: Callable[[Tensor], AbstractContextManager[None]] = lambda _: nullcontext()
        torch_calls.watch()
        if how.measure_updates:
            self.measure_updates()
        try:
            self.buckets.attach()  # claims parameters: other threads may ask for their owner then
        except BaseException:
            self.buckets.remove()
            raise

    def remove(self) -> None:
        """Takes the hooks off the parameters, the modules and the optimizer."""
        self._take_back()
        self.buckets.remove()
        owners.release(self.layout.names, self)
        if self.optimizer.fused is self.layout:
            self.optimizer.fused = self.optimizer.end_backward = None

    def measure_updates(self) -> None:
        """Makes ``metrics`` tell the RMS of updates and weights from the next step on."""
        if self.optimizer.meter is None:
            self.optimizer.meter = meter.Meter(len(self.optimizer.param_groups))

    def give_way(self) -> None:
        """Takes the hooks off the parameters and modules; to step by them is an error then."""
        self._take_back()
        self.is_replaced = True
        self.leave()
        owners.release(self.layout.names, self)

    def unfinished(self) -> str:
        """What would be lost of the step in progress if it ended now; empty if nothing."""
        if self.tally.kept:
            return "gradients that wait for the rest of their micro-batches"
        if self.tally.is_measured:
            return "measured gradients that it has not stepped by"
        return "gradients that it has not stepped by" if self.buckets.holds() else ""

    def check_owner(self) -> None:
        """Raises RuntimeError if another owner has taken the parameters over."""
        if self.is_replaced:
            raise RuntimeError(
                "another engine, or call of fuse_into_backward, steps this model now: go on with "
                "that, or make a new one."
            )

    def kept_bytes(self) -> int:
        """What this rank holds of gradients between backward passes if they are kept."""
        size = (self.how.accumulate_in or torch.float32).itemsize
        params = [p for p in self.optimizer.group_of if p.requires_grad]
        return size * sum(len(self.layout.shard(p)) for p in params)

    def backward(self, loss: Tensor) -> None:
        """Runs ``loss`` backward: once, or twice where gradients are clipped exactly."""
        self.is_asked = True
        self.rehearse(loss)
        loss.backward()

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward."""
        return self.reader.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.reader.loss_scale = scale

    @property
    def previous_norm(self) -> float | None:
        """The norm of the last step whose gradients were finite."""
        return self.clipping.previous_norm

    @previous_norm.setter
    def previous_norm(self, norm: float | None) -> None:
        self.clipping.previous_norm = norm

    def unscale(self, placement: Placement) -> float:
        """What makes a summed gradient of the scaled loss the mean gradient of the loss."""
        return self.reader.unscale(placement)

    @property
    def must_measure(self) -> bool:
        """Whether the next backward pass would step by gradients that have to be measured first."""
        return self.clipping.needs_norm and not self._keeps()

    def rehearse(self, loss: Tensor) -> None:
        """Measures gradients by a backward pass of its own, if they have to be.

        Call it before the one that steps. It changes no weight and no state.
        """
        self.check_owner()
        if self.clipping.needs_norm and self.layout.has_kept():
            self.tally.must_keep = True  # a second pass would lack what others have kept
        if not self.must_measure:
            return
        if self.tally.used_up or self.buckets.holds():
            words = self.how.words
            raise RuntimeError(f"{words.clipping}: a parameter {messages.second_gradient(words)}")
        self.layout.refuse_resized()
        self.optimizer.follow_groups()
        self.buckets.begin_with(Measuring(self.tally))
        try:
            self._measure(loss)
        except BaseException:  # nothing has changed: the next backward pass begins anew
            self.buckets.abandon()
            self.buckets.uses.forget(now=False)
            self.tally, self.is_asked = Tally(self.reader), False
            raise
        self.tally.used_up.clear()
        self.tally.is_measured = self.is_asked = True

    def _measure(self, loss: Tensor) -> None:
        """Runs ``loss`` backward to find the norm, of which gradients of others see nothing."""
        with ExitStack() as stack:
            for each in (self, *owners.others_used(self)):
                stack.enter_context(each.repeated(loss))
            stack.enter_context(self.rehearsal.of(loss))
            stack.enter_context(sparing.spared(self, loss, self._own_leaves))
            loss.backward(retain_graph=True)
            self.buckets.finish()
        if self.layout.any(self.rehearsal.changed is not None):
            who = self.rehearsal.changed or "A function, on another rank,"
            raise RuntimeError(messages.cannot_repeat(who, self.how.words))
        self.tally.judge(self.clipping)

    def _own_leaves(self) -> Container[Tensor]:
        """What stands in graphs for the parameters that are stepped."""
        return self.layout.own_leaves(self.optimizer.group_of)

    @contextmanager
    def repeated(self, loss: Tensor) -> Iterator[None]:
        """A backward pass of ``loss`` runs within that is run once more afterwards."""
        with self.unseen(loss), self.layout.rehearsal():
            yield

    @torch.no_grad()
    def finish(self) -> None:
        """Ends a backward pass: what waits in the bucket is used."""
        self.check_owner()
        self.buckets.finish()
        self.buckets.uses.clear()
        self.is_asked = False

    @torch.no_grad()
    def end_step(self) -> StepResult | None:
        """Ends a step, by now stepping what was kept; None if there were no gradients."""
        tally = self.tally
        if tally.kept or self.layout.is_part:
            self.optimizer.check_param_groups()
            for param in [p for p in tally.kept if p not in self.optimizer.group_of]:
                del tally.kept[param]  # taken out of its group since
            tied = self.layout.tied({p: run.g for p, run in tally.kept.items()})
            tally.kept.update((p, Run(g)) for p, g in tied.items())
            tally.record(tally.kept)
            tally.judge(self.clipping)
            if not tally.overflow:
                self._step_kept(tally)
        self.tally = Tally(self.reader)
        if tally.is_empty:
            return None
        self.optimizer.take_back(tally.end())
        return self._conclude(tally)

    @torch.no_grad()
    def discard(self, params: Collection[Tensor]) -> None:
        """Drops what has come of the gradients of ``params`` since the last step, on all ranks.

        What was stepped in backward stays so, and a warning tells. Dropped whole, a step in
        progress has no effect on the next one, also if its backward pass has failed half-way.
        """
        if self.is_replaced:
            return
        self._take_back()
        self.optimizer.follow_groups()
        stepped = self.tally.stepped and self.tally.used_up.intersection(params)
        if stepped and self.layout.is_first:
            logger.warning(
                messages.STEPPED, len(stepped), len(self.optimizer.group_of), self.how.words.sharded
            )
        given, trained = set(params), self.buckets.trained.intersection(self.optimizer.group_of)
        if any(owners.owner(p) is self for p in trained - given):
            self.buckets.discard(given)
            for param in given:
                self.tally.kept.pop(param, None)
            return
        had_begun, self.is_asked = self.is_begun, False
        self.buckets.discard()
        self.tally = Tally(self.reader)
        if self.optimizer.meter is not None:
            self.optimizer.meter.clear()
        self.discarded(had_begun)

    def _take_back(self) -> None:
        """Waits for what kernels have found, and takes back the steps that they did not take."""
        if self.tally.told:
            self.buckets.beside.join()
            self.optimizer.take_back(self.tally.left_alone())

    def clipped_norm(self, params: Collection[Tensor], asked: Mapping[str, Any]) -> Tensor | None:
        """The norm of all gradients since the last step, before clipping; all ranks call it.

        Args:
            params: those whose gradients ``torch.nn.utils.clip_grad_norm_`` is asked to clip.
            asked: its arguments by name.

        Returns:
            The norm, []; None if the step clips by something else, or other parameters.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is asked for.
        """
        max_norm = float(asked.get("max_norm", math.nan))
        is_same = max_norm in (self.how.max_norm, math.inf)
        if self.is_replaced or not is_same or float(asked.get("norm_type", 2)) != 2:
            return None
        trained = self.buckets.trained.intersection(self.optimizer.group_of)
        if not trained.issubset(params):
            return None
        norm = self.norm_so_far()
        if asked.get("error_if_nonfinite") and not norm.isfinite():
            raise RuntimeError(messages.NOT_FINITE)
        return norm

    @torch.no_grad()
    def norm_so_far(self) -> Tensor:
        """Returns the 2-norm of all gradients since the last step, []; all ranks call it."""
        self.finish()
        self._take_back()
        tally = self.tally
        if tally.kept:
            tally = Tally(self.reader)
            tally.record(self.tally.kept)
        norm = tally.norm
        if norm is None:
            none = torch.zeros((), dtype=torch.float64, device=self.layout.device)
            square = self.layout.total(none if tally.square is None else tally.square)
            norm = math.sqrt(square.item() + tally.told_square)  # as the step's own
        return torch.tensor(norm, dtype=torch.float64, device=self.layout.device)

    def leaf(self, param: Tensor) -> Tensor:
        """What stands for a parameter in the graph of a loss."""
        return self.layout.leaf(param)

    @property
    def uses(self) -> Uses:
        """Of the model, since the last backward pass."""
        return self.buckets.uses

    @property
    def is_begun(self) -> bool:
        """Whether gradients have come since the last step."""
        buckets, tally = self.buckets, self.tally
        is_held = buckets.receiver is not None or buckets.holds() or bool(tally.kept)
        return is_held or bool(tally.used_up) or not tally.is_empty

    def begin_with(self, kept: Mapping[Tensor, Tensor]) -> None:
        """Begins a step, with runs of gradients of earlier micro-batches."""
        self._take_back()
        self.buckets.discard()
        self.tally = Tally(self.reader)
        for param, values in kept.items():
            size = self.buckets.size_of[param] // self.layout.of[param].num_shards
            g = nn.functional.pad(values, (0, size - len(values)))
            self.tally.kept[param] = Run(g)

    def move_kept(self, move: Callable[[Tensor], Tensor]) -> None:
        """Puts ``move`` of each kept gradient in its place."""
        for param, run in self.tally.kept.items():
            self.tally.kept[param] = run._replace(g=move(run.g))

    def replace_kept(self, param: Tensor, run: Tensor) -> None:
        """Makes ``run``, [len(shard)], the kept gradient; its norm tells whether it is finite."""
        g = self.tally.kept[param].g
        g[: len(run)].copy_(run)
        self.tally.kept[param] = Run(g)

    def _wanted(self, param: Tensor) -> bool:
        """Whether the optimizer has the parameter. Raises ValueError if it could not step it."""
        if param not in self.optimizer.group_of:
            return False
        unfit.refuse_complex(self.optimizer, [param])
        return True

    def _keeps(self) -> bool:
        """Whether gradients wait for the step."""
        tally, receiver = self.tally, self.buckets.receiver
        is_kept = tally.must_keep or bool(tally.kept) or (receiver is not None and receiver.adds_up)
        return self.how.policy == "sharded" or is_kept or not self.is_boundary()

    def _is_passed_through(self) -> bool:
        """Whether the backward pass in progress may be of another model's loss.

        As a generator's is, which reaches the discriminator: zero_grad() discards the gradients of
        that before it is trained. So they wait for its step.
        """
        return not self.is_asked and (owners.others_reached(self) or owners.others_hidden(self))

    def _begin(self) -> Receiver:
        """Who takes the gradients of the backward pass that begins."""
        self.layout.refuse_resized()
        self.optimizer.check_param_groups()
        tally = self.tally
        if self._is_passed_through() or self._keeps():
            if not self.told_cost and self.layout.is_first:
                logger.info(settings.cost(self.kept_bytes()))
            self.told_cost = True
            return Keeping(tally, self.how.accumulate_in)
        if tally.is_measured:
            tally.is_measured = False  # a further pass would have to be measured anew
            return SteppingMeasured(self.stepper, tally)
        if self.must_measure:
            raise RuntimeError(messages.measure_first(self.how.words))
        tally.coefficient = self.clipping.coefficient(self.previous_norm)
        return Stepping(self.stepper, tally)

    def _step_kept(self, tally: Tally) -> None:
        """Steps parameters by their kept gradients, a bucket at a time, and frees these."""
        order = sorted(tally.kept, key=self.optimizer.number_of.__getitem__)
        for params in self.layout.in_step(order):
            for piece in self.buckets.pieces(params):
                self.stepper.step({p: tally.kept.pop(p) for p in piece}, tally)

    def _conclude(self, tally: Tally) -> StepResult:
        assert tally.norm is not None
        self.norm = norm = tally.norm
        if math.isfinite(norm):
            self.previous_norm = norm
        skipped = tally.overflow and not tally.stepped
        self.skipped += len(tally.bad)
        self.skipped_steps += skipped
        if tally.overflow and self.layout.is_first:
            names = ", ".join(tally.bad) or "their sum"
            what = "the step is skipped" if skipped else "not updated in this step"
            logger.warning("gradients that are not finite, or too large: %s; %s", names, what)
        self.metrics = measured(tally, self.optimizer, self.layout, self.skipped_steps)
        return StepResult(norm, tally.overflow, skipped)


def _refuse_unfit(optimizer: RuleOptimizer, layout: Layout) -> None:
    """Raises ValueError for parameters that are not the model's, or that a rule is not for."""
    strange = sum(p not in layout.names for p in optimizer.group_of)
    if strange:
        raise ValueError(
            f"{strange} of the optimizer's parameters are not in the model: pass the module "
            "that holds all of them."
        )
    for param in optimizer.group_of:
        shard = layout.shard(param)
        unfit.refuse_shape(optimizer, param, shard)
        if state := optimizer.state.get(param):
            fitting.check_kept(optimizer, param, shard, state, param.dtype, None)
