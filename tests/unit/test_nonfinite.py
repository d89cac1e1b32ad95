"""Gradients that a step's first round judges: a bad one reaches nothing, the bucket goes on."""

import copy
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ds_ext
from benchmarks import traffic
from ds_ext.distributed import lockstep
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Sharded
from ds_ext.ops.batch import CPU
from ds_ext.ops.exchange import Exchanges
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.nonfinite import BAD_VOTE, GradCheck
from ds_ext.rules import REGISTRY
from tests.common import needs, optimizer_ranks, paths, table
from tests.common.choose import pairs, params, spread
from tests.common.hypers import BATCHED, SIMULATED, changed

SHAPES = ((30, 70), (40, 20), (9,), (24, 1, 1), (12, 70))
MATRICES = ((30, 70), (40, 20), (16, 16), (20, 40), (12, 70))
SMALL = ((20, 32), (12, 20), (9,), (6, 32))  # which kernels step
SETTINGS = changed(SIMULATED, galoreadamw={"nbits": 32}, lomo={"lr": 0.5})
BAD = 1  # the parameter of a bad gradient, a matrix


def simulate(ranks):
    """``lockstep.simulate`` that adds up ranks in one order, wherever a number lies in a round."""
    merged = [lockstep.lockstep(rules) for rules in ranks]
    for flats in zip(*merged, strict=True):
        if isinstance(flats[0], Exchanges):
            lockstep.combine(flats)
            continue
        total = functools.reduce(torch.add, flats)
        for flat in flats:
            flat.copy_(total)


class Member(optimizer_ranks.Rank):
    """One of the ranks that step the runs of a bucket, where ``path`` does."""

    def __init__(self, path, *given):
        super().__init__(*given)
        self.path = path

    def begin(self, grads, without):
        """Begins a step -> it, and its check, with the votes of all ranks."""
        bucket = [u for i, u in enumerate(self.updates(grads)) if i not in without]
        shards = {u.param: u.shard for u in bucket}
        first = self.checked(shards)
        votes = {
            p: torch.tensor(1.0 if g.double().square().sum() < 3e38 / g.numel() else BAD_VOTE)
            for p, g in zip(self.params, grads, strict=True)
            if p in shards and p not in first
        }
        check = GradCheck(first, votes)
        return self.optimizer.begin(bucket, check), check

    def end(self, step, check):
        """Ends a step -> the parameters with bad gradients, and the sum of squares."""
        step.end()
        self.optimizer.commit_weight_norms()
        skipped, square, _ = check.flags.read()
        self.optimizer.rollback_step(skipped)
        return skipped, square

    def checked(self, shards):
        """The parameters whose gradients rounds check."""
        batched = self.optimizer.in_batches(shards, paths.DEVICE if self.path == "kernels" else CPU)
        assert batched == shards.keys()
        return self.optimizer.first_round_checks(shards)

    def contents(self):
        """The bits of its runs and of what it keeps of them."""
        states = (self.optimizer.state.get(p, {}) for p in self.params)
        pairs = zip(self.runs, states, strict=True)
        return [flattened({"p": run, **state}) for run, state in pairs]


class Simulated:
    """Ranks that step by whole gradients; a parameter of which some are bad is skipped."""

    def __init__(self, path, name, world, shapes, dtype=torch.float32, **how):
        hypers = SETTINGS[name] | how
        cuts = [[Shard.of_rank(s, rank, world) for s in shapes] for rank in range(world)]
        weights = table.weights(shapes, dtype)
        make = functools.partial(OPTIMIZERS[name], **hypers)
        self.ranks = [Member(path, make, weights, shards) for shards in cuts]

    @torch.no_grad()
    def step(self, grads, without=()):
        """Steps by whole gradients -> which parameters were bad, the same on all ranks."""
        begun = [rank.begin(grads, without) for rank in self.ranks]
        simulate([step.generators for step, _ in begun])
        ended = [rank.end(*one) for rank, one in zip(self.ranks, begun, strict=True)]
        (self.square,) = {square for _, square in ended}
        found = [
            [i for i, p in enumerate(rank.params) if any(p is q for q in bad)]
            for rank, (bad, _) in zip(self.ranks, ended, strict=True)
        ]
        assert all(bad == found[0] for bad in found)
        return found[0]

    def judged_square(self, grads):
        """The sum of squares of the gradients that the first round of a step judges."""
        first = self.ranks[0]
        shards = dict(zip(first.params, first.shards, strict=True))
        judged = first.checked(shards)
        pairs = zip(grads, first.params, strict=True)
        return sum(float(g.double().square().sum()) for g, p in pairs if p in judged)

    def contents(self):
        """What all ranks have, by parameter."""
        return list(zip(*(rank.contents() for rank in self.ranks), strict=True))


def flattened(state):
    """Copies of the tensors and numbers of a state, by path."""
    return {path: torch.as_tensor(x).clone() for path, x in leaves(state)}


def same(a, b, equal=torch.equal):
    """Whether parameters have the same bits, each on all ranks."""
    pairs = [
        (x, y) for some, others in zip(a, b, strict=True) for x, y in zip(some, others, strict=True)
    ]
    return all(x.keys() == y.keys() and all(equal(x[key], y[key]) for key in x) for x, y in pairs)


# Rules whose matrices are judged by their first round, and batched rules that write before it.
JUDGED = ("adalomo", "adafactor", "came", "sinkgd")
LATE = [name for name in OPTIMIZERS if name not in JUDGED and REGISTRY[name].is_batched]
WAYS = [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"weight_update": "master"})]
QUICK = [("native", "adalomo", 1, WAYS[0]), ("native", "adalomo", 2, WAYS[2])]
QUICK += [("native", "adafactor", 5, WAYS[1]), ("native", "came", 2, WAYS[0])]
QUICK += [("native", "sinkgd", 5, WAYS[0]), ("native", "lomo", 2, WAYS[1])]
EVERY = list(itertools.product(["native"], (*JUDGED, *LATE), (1, 2, 5), WAYS))
EVERY = [case for case in EVERY if case[1] != "flashadamw" or case[2] == 1]  # groups are whole
CASES = pairs(EVERY, chosen=QUICK)
if needs.TRITON:
    on_device = spread(BATCHED, [(world, way) for world in (1, 2, 5) for way in WAYS])
    # a group of 8-bit moments that a cut goes through is stepped alone
    on_device = [(name, 1 if name == "flashadamw" else n, way) for name, n, way in on_device]
    # by votes; by sums, beside norms that are known
    quick = [("adamw", 1, WAYS[0]), ("lomo", 2, WAYS[0]), ("adalomo", 1, WAYS[1])]
    on_device += [case for case in quick if case not in on_device]
    CASES += [("kernels", *case) for case in on_device]
    QUICK += [("kernels", *case) for case in quick]


@pytest.mark.parametrize("path, name, world, way", params(CASES, QUICK))
def test_a_bad_gradient_is_as_if_it_had_not_come(path, name, world, way, monkeypatch):
    """Of any rank, in a first step and in later ones, to the last bit and step number.

    Also of weights that were edited before it. On a device, RMS(p) that is known is added up in
    another order than that of a bucket with other parameters.
    """
    paths.use(monkeypatch, path)
    dtype, how = way
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    knows = path == "kernels" and name in ("adalomo", "adafactor")
    alike = functools.partial(torch.allclose, rtol=rtol, atol=rtol) if knows else torch.equal
    shapes = SHAPES if REGISTRY[name].any_shape else MATRICES
    if path == "kernels":
        shapes = SMALL if name != "scale" else SMALL[:2]
    values = itertools.cycle([math.nan, 1e19, math.inf, -math.inf])
    ranks, others = (Simulated(path, name, world, shapes, dtype, **how) for _ in range(2))
    for step, grads in enumerate(table.gradients(5, shapes, dtype)):
        if step in (0, 2, 3):
            for rank in (*ranks.ranks, *others.ranks):
                rank.runs[BAD][1:].mul_(1.5)  # what was known of it holds no more
            before = ranks.contents()[BAD : BAD + 1]
            others.step(grads, without=[BAD])
            grads[BAD].view(-1)[(step * 7919) % grads[BAD].numel()] = next(values)
            assert ranks.step(grads) == [BAD]
            assert same(ranks.contents()[BAD : BAD + 1], before)
            assert math.isinf(ranks.square) == (name in JUDGED)
        else:
            assert ranks.step(grads) == others.step(grads) == []
            assert ranks.square == pytest.approx(ranks.judged_square(grads), rel=1e-5)
        assert same(ranks.contents(), others.contents(), alike), step
    assert ranks.ranks[0].optimizer.state[ranks.ranks[0].params[BAD]]["step"] == 2


# In backward: rules that need votes, and those whose first round judges.
VOTED = [(name, "native") for name in OPTIMIZERS if not REGISTRY[name].is_batched]
VOTED += [(name, "native") for name in (*LATE, *JUDGED)]
VOTED += [(name, "ops") for name in ("adalomo", "adafactor", "came", "adamw")]


@pytest.mark.parametrize("name, path", VOTED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
def test_a_bad_gradient_in_backward_changes_nothing_else(name, path, bad, monkeypatch, caplog):
    paths.use(monkeypatch, path)
    torch.manual_seed(0)
    layers = (nn.Linear(*sizes, bias=False) for sizes in ((24, 16), (16, 8)))
    models = [nn.Sequential(*layers)]
    models.append(copy.deepcopy(models[0]))
    hypers = SETTINGS[name] | {"ema_decay": 0.9}
    optimizers = [OPTIMIZERS[name](model.parameters(), **hypers) for model in models]
    steppers = [ds_ext.fuse_into_backward(*pair) for pair in zip(models, optimizers, strict=True)]
    weight, state = models[0][0].weight, optimizers[0].state

    def step(i, is_bad):
        mask = (torch.arange(24) == 5) & is_bad
        hook = models[i][0].weight.register_hook(lambda g: torch.where(mask, bad, g))
        (models[i](torch.ones(3, 24)).square().sum() / 100).backward()
        optimizers[i].step()
        hook.remove()

    before = weight.detach().clone()
    step(0, True)
    step(1, False)
    assert torch.equal(weight, before) and not state.get(weight)
    assert torch.equal(models[0][1].weight, models[1][1].weight)
    assert not torch.equal(models[1][0].weight, before)
    assert steppers[0].metrics["skipped_parameters"] == steppers[0].skipped == 1
    assert steppers[0].norm == math.inf and "0.weight" in caplog.text
    step(0, False)
    assert torch.equal(state[weight]["ema"].view_as(weight), weight)  # the first copy
    step(0, False)
    before, others = weight.detach().clone(), flattened(state[models[0][1].weight])
    kept = flattened(state[weight])
    step(0, True)
    assert torch.equal(weight, before) and same([[flattened(state[weight])]], [[kept]])
    assert not torch.equal(flattened(state[models[0][1].weight])[("ema",)], others[("ema",)])


def test_votes_are_added_up_over_replicas_too():
    placement = Sharded(None)
    placement.replicas = SimpleNamespace(
        allreduce_coalesced=lambda runs: SimpleNamespace(wait=lambda: [run.mul_(2) for run in runs])
    )
    param = nn.Parameter(torch.ones(4))
    layout = Layout(None, {param: "p"}, lambda _: placement)
    (run,), votes, wait = layout.reduce([param], [torch.ones(4)], torch.ones(1))
    wait()
    assert run.tolist() == [2] * 4 and votes.tolist() == [2]


def test_a_batch_of_bad_gradients_alone_ends(monkeypatch):
    paths.use(monkeypatch, "native")
    shapes = ((30, 70), (40, 20))
    ranks = Simulated("native", "adalomo", 2, shapes)
    before = ranks.contents()
    assert ranks.step([torch.full(s, math.nan) for s in shapes]) == [0, 1]
    assert same(ranks.contents(), before) and not any(rank.optimizer.state for rank in ranks.ranks)
    (grads,) = table.gradients(1, shapes, torch.float32)
    assert ranks.step(grads) == []


def test_large_gradients_whose_sums_are_finite_are_good():
    ranks = Simulated("native", "adalomo", 2, ((30, 70),))
    (g,) = (table.gradients(1, ((30, 70),), torch.float32))[0]
    assert ranks.step([1e12 * g]) == []
    assert ranks.step([1e18 * g / g.abs().max()]) == [0]  # 2,100 squares may overflow
    assert [rank.optimizer.state[rank.params[0]]["step"] for rank in ranks.ranks] == [1, 1]


def test_rules_that_are_known_to_be_judged_by_their_rounds():
    """If a rule leaves this list, its gradients are passed over once more in backward.

    That a rule of the list yields before it writes: test_every_rule.py.
    """
    for name, entry in REGISTRY.items():
        shard = Shard.of_rank((32, 64), 1, 2)
        assert entry.sums_first(entry.rule(**SETTINGS[name]), shard) == (name in JUDGED), name


@needs.triton
def test_adalomo_passes_over_8_bytes_of_a_bf16_matrix_in_backward(monkeypatch):
    paths.use(monkeypatch, "native")
    found = traffic.in_a_step("adalomo", torch.bfloat16, is_fused=True)
    assert (found["g"], found["p read"], found["p written"], found["bytes"]) == (2, 1, 1, 8)
    by_kernels = traffic.in_a_step("adalomo", torch.bfloat16, is_fused=True, by="kernels")
    assert by_kernels == found
    lomo = traffic.in_a_step("lomo", torch.bfloat16, is_fused=True)
    assert lomo["g"] == 2  # a read of its own for the norm, and to see whether it is finite


def test_no_plan_holds_gradients_after_a_step_with_a_bad_one(monkeypatch):
    paths.use(monkeypatch, "native")
    optimizers = Simulated("native", "adalomo", 2, ((6, 5), (4, 3)))
    assert optimizers.step([torch.full((6, 5), math.inf), torch.ones(4, 3)]) == [0]
    plans = [plan for rank in optimizers.ranks for plan in rank.optimizer._plans.values()]
    batches = [one.batch for plan in plans for one in plan.batches]
    assert batches and all(batch.passes.gradients is None for batch in batches)
