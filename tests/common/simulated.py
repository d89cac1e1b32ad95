"""Runs on simulated ranks of the tests' table, and what they are compared with."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_ext.distributed import lockstep
from ds_ext.ops.exchange import Exchanges
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, bucket_step, state_checks
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY
from ds_ext.testing.simulation import EXACT as EXACT
from ds_ext.testing.simulation import Ranks, errors
from tests.common import table
from tests.common.hypers import SIMULATED

BROKEN = 1e-4  # what an error must reach to count as seen


def begin_alone(optimizer: RuleOptimizer, u: RunUpdate) -> list[Any]:
    """The generators of a run's step, whose state is made if there is none."""
    state = optimizer.state[u.param]
    if not state:
        state_checks.make(optimizer, u, state)
    return bucket_step.begin_rules(optimizer, u, state, optimizer.rule_of(u.param))


@contextlib.contextmanager
def fake_rank(rank, size):
    """This process is a rank of a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dropping(number):
    """lockstep.simulate in which ranks do not hear from others in round ``number``."""

    def simulate(ranks):
        merged = [lockstep.lockstep(rules) for rules in ranks]
        for k in itertools.count():
            flats = [next(m, None) for m in merged]
            if flats[0] is None:
                assert all(f is None for f in flats)
                return k
            if k != number:
                lockstep.combine(flats)
            elif isinstance(flats[0], Exchanges):
                for rank, exchanges in enumerate(flats):
                    Alone(rank, len(flats)).exchange(exchanges)

    return simulate


def ranks_after(rule, before, steps, world=1):
    """The ranks that have stepped weights by the whole gradients of each step."""
    ranks = Ranks(rule, before, world)
    for grads in steps:
        ranks.step(grads)
    return ranks


def cut(x, shard):
    """A copy of the run of ``x`` that a shard holds, [len(shard)]."""
    return x.detach().reshape(-1)[shard.start : shard.stop].clone()


def shapes_of(name, shapes=table.SHAPES):
    """Those of the shapes that a registered rule is for."""
    return tuple(s for s in shapes if REGISTRY[name].any_shape or len(s) == 2)


def sharded_error(name, world, steps=10, simulate=lockstep.simulate, shapes=table.SHAPES):
    """The worst error of a registered rule on ``world`` ranks against itself on one, and both."""
    rule, shapes = OPTIMIZERS[name].hypers(**SIMULATED[name]), shapes_of(name, shapes)
    before = table.weights(shapes)
    whole, ranks = Ranks(rule, before, 1), Ranks(rule, before, world)
    for grads in table.gradients(steps, shapes):
        whole.step(grads)
        ranks.step(grads, simulate)
    return max(errors(ranks.params, whole.params, before)), whole, ranks


@dataclass(frozen=True)
class Formula:
    """What a rule is compared with: its authors' code or its paper, on whole parameters.

    ``rule`` and ``expected`` return the rule with a setting, and the parameters of some shapes
    after all steps with it; ``blocks`` are a setting, and shapes for blocks of any size.
    """

    rule: Callable[[str], Any]
    expected: Callable[[str, tuple[Any, ...]], list[Tensor]]
    settings: Sequence[str]
    shapes: tuple[Any, ...]
    steps: int
    blocks: Sequence[tuple[str, tuple[Any, ...]]] = ()
    gradients: Callable[[int, tuple[Any, ...]], Any] = table.gradients

    def error(self, setting, world, shapes=None):
        """Returns the largest error of a simulated run, relative to a parameter's update."""
        shapes = shapes or self.shapes
        before = table.weights(shapes)
        steps = self.gradients(self.steps, shapes)
        ranks = ranks_after(self.rule(setting), before, steps, world)
        return max(errors(ranks.params, self.expected(setting, shapes), before))
