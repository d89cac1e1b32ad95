"""What becomes of the gradients of a backward pass: each way is an object that receives runs.

A backward pass has one receiver. ``Stepping`` and ``SteppingMeasured`` are the policy ``fused``:
they use gradients at once, and keep none. ``Keeping`` is ``sharded``: it adds this rank's runs up
until the step. ``Measuring`` is the first of the two passes of exact clipping.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set

import torch
from torch import Tensor

from ds_ext import ops
from ds_ext.backward.reading import Runs
from ds_ext.backward.runs import NOBODY, Run, Voters, apart
from ds_ext.backward.tally import Tally
from ds_ext.distributed.layout import Layout
from ds_ext.ops.triton import devices
from ds_ext.optimizer import RuleOptimizer
from ds_ext.optimizer.run_updates import RunUpdate
from ds_ext.optimizer.verdict import Verdict


class Stepper:
    """Steps ``optimizer`` by runs of gradients, and publishes what was stepped.

    ``has_bounds`` tells whether the elements of gradients are bounded before.
    """

    def __init__(self, optimizer: RuleOptimizer, layout: Layout, has_bounds: bool) -> None:
        self.optimizer = optimizer
        self.layout = layout
        self.has_bounds = has_bounds

    def step(
        self,
        runs: Runs,
        tally: Tally,
        judged: Set[Tensor] = frozenset(),
        votes: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """Steps parameters by their gradients, which ``tally`` notes as used.

        Those of ``judged`` are judged by the first round of the step, on a GPU by the device, which
        judges others by ``votes``.
        """
        tally.use_up(runs.keys())
        verdict = Verdict(judged, votes, tally.begin_told())
        for all_reduce, params in self._by_statistics_group(runs.keys()):
            updates = [self._update(param, runs[param], tally) for param in params]
            self.optimizer.update(updates, all_reduce, verdict)
        tally.add(verdict)
        stepped = [p for p in runs if p not in verdict.bad] if verdict.bad else runs
        self.layout.publish(stepped)
        self.optimizer.settle()
        tally.stepped += len(stepped)

    def voters(self, params: Sequence[Tensor]) -> Voters:
        """Those whose gradients the first round of their step cannot judge, the same on all ranks.

        These are all where elements are bounded before rules see them; and where parameters lie in
        several ways, for ranks that do not have one would not be told. On a GPU the host reads the
        votes of parameters that no kernels step, before it steps these alone; it would have to
        wait for each round of them too.
        """
        layout = self.layout
        shards = {p: layout.shard(p) for p in params}
        is_host = layout.device.type == "cpu" and not devices.take(layout.device)
        there = {p: s for p, s in shards.items() if p.device == layout.device}
        on_device = self.optimizer.in_kernels(there, layout.device)
        first: Set[Tensor] = frozenset()
        if layout.is_uniform and not self.has_bounds:
            some = shards if is_host else {p: shards[p] for p in on_device}
            first = self.optimizer.shows_first(some) if some else first
        others = set(params) - first
        return Voters(others - on_device, others & on_device)

    def _update(self, param: Tensor, run: Run, tally: Tally) -> RunUpdate:
        """This rank's part in the step of a parameter."""
        g = tally.reader.gradient(param, run, tally.coefficient)
        replicas = self.layout.num_replicas(self.layout.of[param])
        return RunUpdate(param, self.layout.run(param), g, self.layout.shard(param), replicas)

    def _by_statistics_group(
        self, params: Collection[Tensor]
    ) -> list[tuple[Callable[[Tensor], None], list[Tensor]]]:
        """Parameters whose partial sums are added up over the same ranks, and how."""
        found: dict[object, tuple[Callable[[Tensor], None], list[Tensor]]] = {}
        for placement, some in self.layout.by_placement(params):
            found.setdefault(placement.statistics_group, (placement.all_reduce, []))[1].extend(some)
        return list(found.values())


class Stepping:
    """Steps parameters by gradients that nobody measured before, but for those that are bad."""

    adds_up = False

    def __init__(self, stepper: Stepper, tally: Tally) -> None:
        self.stepper, self.tally = stepper, tally

    def voters(self, params: Sequence[Tensor]) -> Voters:
        """Those that are changed before sums of them travel."""
        return self.stepper.voters(params)

    def receive(self, runs: dict[Tensor, Run]) -> None:
        """Steps by the finite ones of the runs."""
        voted = {p: run for p, run in runs.items() if run.is_voted}
        if voted:
            self.tally.record(voted)
        bad = self.tally.find_bad()
        good = {p: run for p, run in runs.items() if p not in bad} if bad else runs
        votes = {p: run.votes for p, run in voted.items() if run.votes is not None}
        self.stepper.step(good, self.tally, runs.keys() - voted.keys(), votes)
        self.tally.use_up(bad)


class SteppingMeasured:
    """Steps parameters by gradients that an earlier pass has measured: all of them, or none."""

    adds_up = False

    def __init__(self, stepper: Stepper, tally: Tally) -> None:
        self.stepper, self.tally = stepper, tally

    def voters(self, params: Sequence[Tensor]) -> Voters:
        """None: all are known to be good, or none is stepped."""
        return NOBODY

    def receive(self, runs: dict[Tensor, Run]) -> None:
        """Steps by the runs, unless a gradient of the step is bad."""
        if not self.tally.overflow:
            self.stepper.step(runs, self.tally)


class Measuring:
    """Takes the norm of gradients, and nothing else."""

    adds_up = False

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def voters(self, params: Sequence[Tensor]) -> Voters:
        """None: the sums of squares tell."""
        return NOBODY

    def receive(self, runs: dict[Tensor, Run]) -> None:
        """Adds the runs to the norm."""
        self.tally.use_up(runs)
        self.tally.record(runs)


class Keeping:
    """Adds gradients to those that wait for the step, in ``dtype``, None for the accumulator's."""

    adds_up = True

    def __init__(self, tally: Tally, dtype: torch.dtype | None) -> None:
        self.kept, self.dtype = tally.kept, dtype

    def voters(self, params: Sequence[Tensor]) -> Voters:
        """None: the sums of squares tell, when the step comes."""
        return NOBODY

    def receive(self, runs: dict[Tensor, Run]) -> None:
        """Adds the runs to the kept ones."""
        for param, run in runs.items():
            if param in self.kept:
                self.kept[param] = self.kept[param].plus(run)
            else:
                self.kept[param] = apart(run, self.dtype or ops.accumulator(run.g.dtype))
