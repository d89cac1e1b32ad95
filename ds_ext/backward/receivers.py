"""Receivers of the gradients of a backward pass: they step, measure or keep them.

A backward pass has one receiver. With the policy ``fused``, ``Stepping`` and ``SteppingMeasured``
use gradients at once and keep none. With ``sharded``, ``Accumulating`` adds up this rank's runs
until the step. ``Measuring`` receives the first of the two passes of exact clipping.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_ext.backward.gradient_config import GradientConfig
from ds_ext.backward.int8_weights import step_key
from ds_ext.backward.reduced_grad import Receiver, ReducedGrad, ReducedGrads, VotedParams, add_up
from ds_ext.backward.step_state import StepState
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Placement
from ds_ext.logs import logger
from ds_ext.ops import int8
from ds_ext.optimizer import RuleOptimizer
from ds_ext.optimizer.nonfinite import GradCheck
from ds_ext.optimizer.plans import MAX_PLANS
from ds_ext.optimizer.updates import RunUpdate


@dataclass
class Stepper:
    """Steps ``optimizer`` by runs of gradients, and publishes the updated weights."""

    optimizer: RuleOptimizer
    layout: Layout
    has_bounds: bool  # whether elements of gradients are bounded (``clip_value``)
    _voted: dict[tuple[Any, ...], VotedParams] = field(default_factory=dict)  # for ``_version``
    _version: Any = None  # of the optimizer
    _has_logged: bool = False  # the cost of kept gradients

    def step(
        self,
        grads: ReducedGrads,
        state: StepState,
        checked: Set[Tensor] = frozenset(),
        votes: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """Steps parameters by their gradients, and records them in ``state``.

        Args:
            grads: the gradients.
            state: of the step in progress.
            checked: parameters whose gradients are checked by the sums of the first round.
            votes: votes by which passes check other gradients.
        """
        state.use_up(grads.keys())
        check = GradCheck(checked, votes or {}, state.flags)
        with int8.expanded(grads) as in_int8:
            for collectives, found in self._by_statistics_group(grads):
                updates: list[RunUpdate] = []
                for placement, params in found:
                    updates += self._updates(placement, params, grads, state)
                self.optimizer.update(updates, collectives, check)
            self.layout.publish(grads)
            self.optimizer.commit_weight_norms()
            for param in in_int8:
                int8.update(param, step_key(self.optimizer, param))
        state.stepped += len(grads)

    def voted_params(self, params: Sequence[Tensor]) -> VotedParams:
        """Returns the parameters that need votes, because the first round cannot check them.

        They are the same on all ranks. All parameters need votes in two cases: elements are bounded
        before rules read them, or parameters have different placements, because ranks without a
        parameter take no part in its round. The host reads votes only for parameters that are
        stepped alone. A check in a round would make it wait for a GPU in every round.
        """
        for i in range(len(self.optimizer.index.groups)):
            self.optimizer.rule_at(i)  # follows an edit of the group
        if self._version != self.optimizer.version:
            self._voted, self._version = {}, self.optimizer.version
        key = tuple([(id(p), p.dtype, p.device) for p in params])
        if key in self._voted:  # else it takes some 7 µs for each parameter
            return self._voted[key]
        if len(self._voted) >= MAX_PLANS:
            self._voted.clear()
        layout = self.layout
        shards = {p: layout.shards[p] for p in params}
        in_batches = self.optimizer.in_batches(shards, layout.device)
        by_sums: Set[Tensor] = frozenset()
        if layout.is_uniform and not self.has_bounds:
            some = {p: shards[p] for p in in_batches}
            by_sums = self.optimizer.first_round_checks(some)
        found: tuple[set[int], set[int]] = set(), set()  # read by the host, by passes
        for i, p in enumerate(params):
            if p not in by_sums:
                found[p in in_batches].add(i)
        self._voted[key] = VotedParams(*found)
        return self._voted[key]

    def log_kept(self, config: GradientConfig, why: str = "") -> None:
        """Logs once what kept gradients cost, after ``why`` they are kept."""
        if self._has_logged or not self.layout.is_first:
            return
        self._has_logged = True
        kept = sum(len(self.layout.shards[p]) for p in self.optimizer.group_of if p.requires_grad)
        mib = kept * (config.accumulate_in or torch.float32).itemsize / 2**20
        logger.info(f"{why}gradients are kept until the step: {mib:,.1f} MiB on this rank")

    def _updates(
        self,
        placement: Placement,
        params: list[Tensor],
        grads: ReducedGrads,
        state: StepState,
    ) -> Iterator[RunUpdate]:
        """The runs of weights and gradients on this rank, of parameters with one placement.

        Gradients are averaged and clipped.
        """
        factor = state.reader.unscale(placement) * state.coefficient
        replicas = self.layout.num_replicas[placement]
        for param in params:
            shard = self.layout.shards[param]
            g = state.reader.gradient(param, grads[param].g, shard, factor)
            yield RunUpdate(param, placement.run(param, shard), g, shard, replicas)

    def _by_statistics_group(
        self, params: Collection[Tensor]
    ) -> list[tuple[Placement | None, list[tuple[Placement, list[Tensor]]]]]:
        """Parameters by the ranks that add up their partial sums, each with its collectives."""
        found: dict[object, Any] = {}
        for placement, some in self.layout.by_placement(params):
            # without collectives, partial sums are not copied
            collectives = placement if placement.sends_sums else None
            of_group = found.setdefault(placement.statistics_group, (collectives, []))
            of_group[1].append((placement, some))
        return list(found.values())


class Stepping(Receiver):
    """Steps parameters by gradients that were not measured; skips those with bad gradients."""

    def __init__(self, stepper: Stepper, state: StepState) -> None:
        self.stepper, self.state = stepper, state

    def voted_params(self, params: Sequence[Tensor]) -> VotedParams:
        """Returns the parameters whose first round cannot check gradients."""
        return self.stepper.voted_params(params)

    def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
        """Steps by the good gradients."""
        voted = {p: x for p, x in grads.items() if x.bad is not None or x.votes is not None}
        if not voted:
            self.stepper.step(grads, self.state, grads.keys())
            return
        self.state.record(voted)
        bad = self.state.find_bad(voted)
        good = {p: grad for p, grad in grads.items() if p not in bad} if bad else grads
        votes = {p: grad.votes for p, grad in voted.items() if grad.votes is not None}
        self.stepper.step(good, self.state, grads.keys() - voted.keys(), votes)
        self.state.use_up(bad)


class SteppingMeasured(Receiver):
    """Steps by gradients that an earlier pass has measured and checked: all of them, or none."""

    def __init__(self, stepper: Stepper, state: StepState) -> None:
        self.stepper, self.state = stepper, state

    def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
        """Steps by the runs, unless a gradient of the step is bad."""
        if not self.state.bad:
            self.stepper.step(grads, self.state)


class Measuring(Receiver):
    """Measures the norm of gradients. The sums of squares show which are bad."""

    def __init__(self, state: StepState) -> None:
        self.state = state

    def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
        """Adds the runs to the norm."""
        self.state.use_up(grads)
        self.state.record(grads)


class Accumulating(Receiver):
    """Adds gradients to the kept ones, in ``dtype``; None: the accumulator's dtype.

    Their sums of squares show at the step which are bad.
    """

    accepts_parts = True

    def __init__(self, state: StepState, dtype: torch.dtype | None) -> None:
        self.kept, self.dtype = state.kept, dtype

    def receive(self, grads: dict[Tensor, ReducedGrad]) -> None:
        """Adds the runs to the kept ones."""
        add_up(self.kept, grads, self.dtype)
