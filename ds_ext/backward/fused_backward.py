"""The step inside backward, by one of two gradient policies.

``fused`` steps a parameter as soon as its gradient is reduced, so no gradient is kept. To clip
exactly, it runs the graph backward twice, first only to measure the norm. ``sharded`` keeps this
rank's run of each gradient until the step, over any number of backward passes, and clips it.
A gradient that is not finite skips its parameter, or the whole step if it was measured or kept
first.
"""

import functools
import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

from ds_ext.backward import error_texts, int8_weights, owners, receivers
from ds_ext.backward.buckets import MEASURED, READ, Buckets
from ds_ext.backward.foreign_grads import preserved
from ds_ext.backward.gradient_config import GradientConfig
from ds_ext.backward.norm_prepass import NormPrepass
from ds_ext.backward.reduced_grad import GradientReader, Receiver, ReducedGrad
from ds_ext.backward.single_use import single_use
from ds_ext.backward.step_state import Clipping, StepResult, StepState, collect_metrics
from ds_ext.backward.torch_calls import install_patches
from ds_ext.distributed import consensus
from ds_ext.distributed.layout import Layout
from ds_ext.logs import logger, warn_once
from ds_ext.ops import int8
from ds_ext.optimizer import RuleOptimizer, ema_exchange, param_checks, state_checks


class FusedBackward:
    """Steps ``optimizer`` by the gradients of ``module``, on the runs that ``layout`` gives.

    Args:
        module, optimizer, layout: the model, its optimizer, and its layout.
        grad_config: policy, clipping and buckets.
        comm_dtype: returns the dtype that a parameter's gradient is reduced in, None for its own.
        is_boundary: returns, during a backward pass, whether the step follows it.
        on_replaced: called when another owner takes the parameters over; by default removes hooks.
        on_discarded: called after a step was discarded, with whether it had received gradients.
        rerun_context: returns a context for a backward pass of a loss that is run once more.

    Attributes:
        state: of the step in progress.
        norm, metrics: of the last step.
        skipped, skipped_steps: numbers of parameters' updates, and of whole steps, skipped so far.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: RuleOptimizer,
        layout: Layout,
        grad_config: GradientConfig,
        comm_dtype: Callable[[Tensor], torch.dtype | None] = lambda param: None,
        is_boundary: Callable[[], bool] = lambda: True,
        on_replaced: Callable[[], None] | None = None,
        on_discarded: Callable[[bool], None] = lambda had_begun: None,
        rerun_context: Callable[[Tensor], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        check = functools.partial(state_checks.check_model, optimizer, layout)
        if layout.is_pipeline_stage:  # other ranks have other parameters, and wait for this rank
            consensus.run_on_all_ranks(check, ValueError)
        else:
            check()
        for param in filter(int8.find, optimizer.group_of):
            if error := int8_weights.refused_hypers(optimizer, param):
                raise error
        self.optimizer = optimizer
        optimizer.agree_on_executor(layout.device, layout.any)
        self.layout, self.grad_config, self.is_boundary = layout, grad_config, is_boundary
        self.reader = GradientReader(layout, grad_config)
        self.stepper = receivers.Stepper(optimizer, layout, bool(grad_config.max_value))
        self.clipping = Clipping(grad_config.max_norm, grad_config.clip_mode)
        self.names = grad_config.setting_names
        self.state = StepState(self.reader)
        self.norm: float | None = None
        self.skipped = self.skipped_steps = 0
        self.metrics: dict[str, float] = {}
        self.own_loss_is_running = False  # whether the next backward pass is of the model's loss
        size = grad_config.bucket_size_for(layout)
        self.buckets = Buckets(module, layout, size, comm_dtype, self, grad_config.overlap)
        self.uses = self.buckets.uses
        self.prepass = NormPrepass(module, layout.device)
        optimizer.fused = layout
        self.ended = ""  # why it steps no longer: another owner has the parameters, or ``remove``
        self.was_empty = True  # whether there was no gradient in the last step, if there was one
        self._on_replaced = on_replaced or self.buckets.remove
        self._on_discarded, self.rerun_context = on_discarded, rerun_context
        install_patches()
        if grad_config.measure_updates:
            optimizer.measure_updates()
        try:
            self.buckets.attach()  # last, because other threads may then find this owner
        except BaseException:
            self.buckets.remove()
            raise

    def remove(self) -> None:
        """Takes the hooks off the parameters, the modules and the optimizer."""
        self._rollback_skipped()
        self.ended = self.ended or error_texts.REMOVED
        self.buckets.remove()
        owners.release(self.layout.names, self)
        self.optimizer.detach(self.layout)

    def give_way(self) -> None:
        """Lets another owner take the parameters over: this one raises errors from now on."""
        self._rollback_skipped()
        self.ended = error_texts.REPLACED
        self._on_replaced()
        owners.release(self.layout.names, self)

    def unfinished(self) -> str:
        """Describes pending work that would be lost if the step ended now; empty if none."""
        if self.state.kept:
            return "gradients that wait for further micro-batches"
        if self.state.is_measured:
            return "measured gradients that are not applied yet"
        return "gradients that are not applied yet" if self.buckets.holds() else ""

    def check_owner(self) -> None:
        """Raises RuntimeError if it steps no longer, or inside ``ema``."""
        if self.ended:
            raise RuntimeError(self.ended)
        self.optimizer.refuse_exchanged()

    def _error_of_step(self) -> Exception | None:
        """The error of a gradient that no hook took, or of an invalid edit of a group."""
        for param in self.optimizer.params():  # of the groups as they are now
            if param.grad is not None:
                return RuntimeError(error_texts.WRITTEN.format(param=self.layout.name(param)))
        try:
            if self.state.kept or self.buckets.holds() or self.layout.is_pipeline_stage:
                self.optimizer.check_param_groups()
        except ValueError as error:
            return error
        return None

    def ema(self) -> AbstractContextManager[None]:
        """Context, of all ranks, in which the model has the moving averages of its weights.

        Raises:
            ValueError: no group has ``ema_decay``.
            RuntimeError: a step is in progress.
        """
        self.check_owner()
        if self.is_begun:
            raise RuntimeError(error_texts.BEGUN)
        self.optimizer.follow_groups()
        return ema_exchange.exchanged(self.optimizer, self.layout)

    def backward(self, loss: Tensor) -> None:
        """Runs ``loss`` backward: once, or twice where gradients are clipped exactly."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward takes the loss, a tensor of one number, not {type(loss)}.")
        self.own_loss_is_running = True
        self.measure_norm(loss)
        loss.backward()

    def measure_norm(self, loss: Tensor) -> None:
        """Measures the norm of the gradients by a separate backward pass, if that is needed.

        Call it before the backward pass that steps. It changes no weight and no state.
        """
        self.check_owner()
        if self.clipping.needs_norm and self.layout.has_kept():
            self.state.must_keep = True  # a second pass would lack gradients that FSDP2 has kept
        if not self.clipping.needs_norm or self._keeps():
            return
        if self.state.norm is not None or self.state.used_up or self.buckets.holds():
            text = error_texts.SECOND_BACKWARD.format(names=self.names)
            raise RuntimeError(f"{self.names.clipping}: {text}")
        self.buckets.note(MEASURED)
        # On all ranks an error, before other collectives, if some are in another pass.
        self.layout.agree([], set(), False, self.buckets.history)()
        who = single_use(loss)
        if self.layout.any(who is not None):
            self.state.must_keep = True
            who = who or "a function on another rank"
            why = error_texts.KEPT_FOR.format(who=who, names=self.names)
            self.stepper.log_kept(self.grad_config, why)
            return
        self.layout.refuse_resized()
        self.optimizer.follow_groups()
        self.buckets.receiver = receivers.Measuring(self.state)
        try:
            self._run_prepass(loss)
        except BaseException:  # nothing has changed: the next backward pass begins a new step
            self.buckets.abandon()
            self.buckets.uses.forget(now=False)
            self.state = StepState(self.reader)
            self.own_loss_is_running = False
            raise
        self.state.used_up.clear()
        self.state.is_measured = self.own_loss_is_running = True

    def _run_prepass(self, loss: Tensor) -> None:
        """Runs ``loss`` backward to compute the norm; leaves gradients of others unchanged."""
        with ExitStack() as stack:
            for each in (self, *owners.others_used(self)):
                stack.enter_context(each.rerun_context(loss))
            stack.enter_context(self.prepass.repeatable(loss))
            stack.enter_context(preserved(self, loss))
            loss.backward(retain_graph=True)
            self.buckets.finish()
        if self.layout.any(self.prepass.changed is not None):
            who = self.prepass.changed or "A function on another rank"
            raise RuntimeError(error_texts.CANNOT_REPEAT.format(who=who, names=self.names))
        self.state.reduce_norm(self.clipping)

    @torch.no_grad()
    def finish(self, ends_step: bool = False) -> None:
        """Ends a backward pass: reduces and delivers the gradients that wait in the bucket.

        If it ``ends_step``, an error of the step is raised before anything is stepped.
        """
        self.check_owner()
        error = self._error_of_step() if ends_step else None
        self.buckets.error = error or self.buckets.error
        self.buckets.finish()
        if error is not None:
            raise error
        self.buckets.uses.clear()
        self.own_loss_is_running = False

    @torch.no_grad()
    def end_step(self) -> StepResult | None:
        """Steps by kept gradients and ends the step; returns None if there were no gradients."""
        state = self.state
        if state.stepped:
            rules = [self.optimizer.rule_at(i) for i in range(len(self.optimizer.index.groups))]
            if rules != state.rules and self.layout.is_first:
                logger.warning(error_texts.EDITED.format(names=self.names))
        if state.kept or self.layout.is_pipeline_stage:
            taken_out = [p for p in state.kept if p not in self.optimizer.group_of]
            state.drop(taken_out)
            tied = self.layout.tied({p: run.g for p, run in state.kept.items()})
            state.kept.update((p, ReducedGrad(g)) for p, g in tied.items())
            state.record(state.kept)
            state.reduce_norm(self.clipping)
            if not state.bad:
                order = sorted(state.kept, key=self.optimizer.number_of.__getitem__)
                for params in self.layout.in_step(order):
                    for piece in self.buckets.pieces(params):
                        self.stepper.step({p: state.kept.pop(p) for p in piece}, state)
        self.state = StepState(self.reader)
        if state.is_empty:
            # A stage may have no weights. accelerate may call step() twice.
            if self.was_empty and self.layout.is_first and not self.layout.is_pipeline_stage:
                warn_once(error_texts.NOTHING.format(names=self.names))
            self.was_empty = True
            return None
        self.was_empty = False
        if skipped := state.end():
            self.optimizer.rollback_step(skipped)
        return self._report(state)

    @torch.no_grad()
    def discard(self, params: Collection[Tensor]) -> None:
        """Drops the gradients of ``params`` since the last step, on all ranks.

        Updates made in backward stay; a warning says so. If all parameters are given, the whole
        step is dropped and has no effect on the next one, even if its backward pass has failed.
        A norm that backward has measured still contains the gradients of ``params``.
        """
        if self.ended:
            return
        self._rollback_skipped()
        self.optimizer.follow_groups()
        stepped = self.state.stepped and self.state.used_up.intersection(params)
        if stepped and self.layout.is_first:
            counts = {"stepped": len(stepped), "params": len(self.optimizer.group_of)}
            logger.warning(error_texts.STEPPED.format(names=self.names, **counts))
        given = set(params)
        if any(owners.owner(p) is self for p in self.trained - given):
            clips_by_read_norm = self.clipping.max_norm and self.state.is_norm_read
            if clips_by_read_norm and given & self.state.kept.keys():
                raise RuntimeError(error_texts.DROPPED_AFTER_NORM)
            self.buckets.discard(given)
            self.state.drop(given)
            return
        self.drop_step()

    def drop_step(self) -> None:
        """Drops the step in progress without a warning, on all ranks. Its updates stay."""
        self._rollback_skipped()
        had_begun, self.own_loss_is_running = self.is_begun, False
        self.buckets.uses.forget(now=self.buckets.receiver is not None)
        self.buckets.abandon()
        self.state = StepState(self.reader)
        if self.optimizer.update_stats is not None:
            self.optimizer.update_stats.clear()
        self._on_discarded(had_begun)

    def _rollback_skipped(self) -> None:
        """Synchronizes with the device, and rolls back the parameters that kernels skipped."""
        if self.state.flags.checked:
            if self.buckets.streams is not None:
                self.buckets.streams.make_current_wait()
            self.optimizer.rollback_step(self.state.read_flags()[0])

    @property
    def trained(self) -> set[Tensor]:
        """The trainable parameters that the optimizer has."""
        return self.buckets.trained.intersection(self.optimizer.group_of)

    @torch.no_grad()
    def norm_so_far(self) -> float:
        """Returns the norm of all gradients since the last step, before clipping, on all ranks."""
        if self.grad_config.has_engine:
            self.buckets.note(READ)  # a rank that has skipped backward is here before others
        self.finish()
        self._rollback_skipped()
        return self.state.norm_so_far()

    @property
    def is_begun(self) -> bool:
        """Whether gradients have come since the last step."""
        buckets, state = self.buckets, self.state
        is_held = buckets.receiver is not None or buckets.holds() or bool(state.kept)
        return is_held or bool(state.used_up) or not state.is_empty

    def accepts(self, param: Tensor) -> bool:
        """Returns whether the optimizer has a parameter. ValueError if it cannot step it."""
        is_ours = param in self.optimizer.group_of
        if is_ours and param.is_complex():
            param_checks.refuse_complex(self.optimizer, [param])
        return is_ours

    def _keeps(self) -> bool:
        """Whether gradients wait for the step."""
        if self.grad_config.policy != "fused" or self.state.must_keep or self.state.kept:
            return True
        receiver = self.buckets.receiver
        return (receiver is not None and receiver.accepts_parts) or not self.is_boundary()

    def make_receiver(self) -> Receiver:
        """Returns the receiver of the backward pass that begins."""
        self.layout.refuse_resized()
        state = self.state
        state.rules = self.optimizer.check_param_groups()
        if owners.may_reach_others(self) or self._keeps():
            self.stepper.log_kept(self.grad_config)
            return receivers.Accumulating(state, self.grad_config.accumulate_in)
        if state.is_measured:
            state.is_measured = False  # another backward pass needs its own norm
            return receivers.SteppingMeasured(self.stepper, state)
        if self.clipping.needs_norm:  # and gradients are not kept
            raise RuntimeError(error_texts.MEASURE_FIRST.format(names=self.names))
        state.coefficient = self.clipping.coefficient(self.clipping.previous_norm)
        return receivers.Stepping(self.stepper, state)

    def _report(self, state: StepState) -> StepResult:
        """Updates norm, metrics and counts, and logs bad gradients."""
        assert state.norm is not None
        self.norm = norm = state.norm
        if math.isfinite(norm):
            self.clipping.previous_norm = norm
        skipped = bool(state.bad) and not state.stepped
        self.skipped += len(state.bad)
        self.skipped_steps += skipped
        if state.bad and self.layout.is_first:
            names = ", ".join(state.bad) or "their sum"
            what = "the step is skipped" if skipped else "not updated in this step"
            logger.warning("gradients that are not finite, or too large: %s; %s", names, what)
        self.metrics = collect_metrics(state, self.optimizer, self.layout, self.skipped_steps)
        return StepResult(norm, bool(state.bad), skipped)
