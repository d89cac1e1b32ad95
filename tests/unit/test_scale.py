"""What ``scale`` counts on tensors without storage is what real ones send; its model of time.

Against rules that step real tensors on 1 to 7 ranks simulated in this process, and against every
collective that real ranks were seen to call.
"""

import argparse
import importlib
import itertools
import math
from collections import Counter

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import benchmarks.spread as side_by_side
import ds_ext
from benchmarks import collectives, comm, counting, fsdp2, giants, links, outlook, scale, staged
from benchmarks.collectives import ALL_REDUCE, REDUCE_SCATTER, Call
from benchmarks.counting import Bucket, Matrix, Rule
from benchmarks.giants import Counted
from benchmarks.links import RING, TREE, Link, Sample
from benchmarks.memory import llama
from ds_ext.backward.receivers import Stepper
from ds_ext.backward.reduced_grad import VotedParams
from ds_ext.distributed import consensus as ranks
from ds_ext.distributed import dtensors
from ds_ext.distributed import lockstep as rounds
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory, models, muon_cost
from ds_ext.rules import REGISTRY, lowrank
from tests.common import apart
from tests.common.choose import params, spread
from tests.common.hypers import FOR_ALL
from tests.distributed.fsdp2_beside_jobs import Matrices

SMALL = (256, 48, 132, 2, 4, 2, False)
STACK = (4, 6, 8)  # of experts; a rank of 2 or 4 holds whole ones, one of 8 or 16 a part of one


class Model(nn.Module):
    """Matrices, tall and wide, a vector, and a stack of experts."""

    def __init__(self):
        super().__init__()
        self.tall, self.wide = nn.Linear(12, 40, bias=False), nn.Linear(50, 9, bias=False)
        self.narrow = nn.Linear(2, 13, bias=False)  # 7 ranks hold whole rows, the last fewer
        self.norm = nn.LayerNorm(33, bias=False)
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.empty(STACK))})


NAMES = ("tall.weight", "wide.weight", "narrow.weight", "norm.weight")


def counted_rounds(name, params, world):
    """Bytes of each round of the first two steps of a bucket, counted on "meta"."""
    with torch.device("meta"):
        rule = Rule(name, Model())
    bucket = Bucket(world, params, 0, (), (), (), ())
    return [stepped.rounds for stepped in rule.of(bucket)]


def stepping(name, p):
    """The rule that steps a parameter of the model: another for what ``name`` is not for."""
    keys = dict(REGISTRY[name].roles.get("other", {})) if p.ndim < 2 else {}
    kind = OPTIMIZERS[keys.pop("type", name).lower()]
    return kind.hypers(**keys, weight_update="nearest")


def real_rounds(name, params, world):
    """The same, by rules that step real tensors on all ranks; the cut is computed here."""
    whole = dict(Model().named_parameters())
    stepped, total = [[] for _ in range(world)], []
    for key in params:
        p = whole[key]
        size, n = -(-p.numel() // world), math.prod(p.shape[-2:])
        rule = stepping(name, p)
        for rank in range(world):
            run = range(min(rank * size, p.numel()), min((rank + 1) * size, p.numel()))
            for first in range(0, p.numel(), n):
                start, stop = (min(max(at - first, 0), n) for at in (run.start, run.stop))
                shard = Shard(tuple(p.shape[-2:]), start, stop, size)
                own = torch.full((stop - start,), 0.5)
                stepped[rank].append((rule, own, zeros(rule.state_spec(shard), own), shard))
    for t in (1, 2):
        sizes = [[] for _ in range(world)]
        merged = [
            rounds.lockstep(
                _noting(rule.step(p, torch.ones_like(p), s, t, shard))
                for rule, p, s, shard in of_rank
            )
            for of_rank in stepped
        ]
        flats = [rounds.merged_rounds(flat) for flat in merged]
        for together in zip(*flats, strict=True):
            for own, flat in zip(sizes, together, strict=True):
                own.append(flat.nbytes)
            summed = torch.stack(together).sum(0)
            for flat in together:
                flat.copy_(summed)
        assert all(own == sizes[0] for own in sizes)
        total.append(tuple(sizes[0]))
    return total


def _noting(rule):
    """A rule as it is; a place to break it in."""
    yield from rule


@pytest.mark.parametrize(
    "name, world",
    params(itertools.product(FOR_ALL, range(1, 8)), spread(FOR_ALL, [(n,) for n in (1, 2, 3, 7)])),
)
def test_rounds_counted_without_storage_are_those_of_real_tensors(name, world, monkeypatch):
    monkeypatch.setattr(lowrank, "SLICE", 100)  # a basis is renewed in several rounds
    found = counted_rounds(name, NAMES, world)
    assert found == real_rounds(name, NAMES, world)
    alone = name in ("flashadamw", "scale") and world == 1
    takes_none = name in ("lomo", "adamw", "lion") or alone
    assert takes_none != bool(sum(map(len, found)))


@pytest.mark.parametrize(
    "name, world",
    params(spread(FOR_ALL, [(2,), (16,)]), [("adafactor", 2), ("lamb", 2)]),
)
def test_each_expert_of_a_stack_has_statistics_of_its_own(name, world):
    found = counted_rounds(name, ("experts.up", *NAMES), world)
    assert found == real_rounds(name, ("experts.up", *NAMES), world)
    alone, experts = (counted_rounds(name, names, world) for names in (NAMES, ("experts.up",)))
    if name == "adalomo":
        least = STACK[0] * 4 * (sum(STACK[1:]) + 1)  # rows, columns, RMS(p)
        assert sum(experts[1]) >= least
    assert [sum(x) + sum(y) for x, y in zip(alone, experts, strict=True)] == list(map(sum, found))


def test_a_cut_that_straddles_experts_is_refused():
    with pytest.raises(ValueError, match="--ranks 3"):
        counted_rounds("adalomo", ("experts.up",), 3)


def test_ranks_that_differ_in_what_they_add_to_are_found(monkeypatch):
    def shard(matrix, rank, world, cut):
        return Shard((40, 12), 0, 160 - rank, 160)

    monkeypatch.setattr(Matrix, "shard", shard)
    before = counting.Rule._steps

    def steps(self, matrix, shard):
        return [sizes * (len(shard) % 2 + 1) for sizes in before(self, matrix, shard)]

    monkeypatch.setattr(counting.Rule, "_steps", steps)
    with pytest.raises(AssertionError, match="ranks differ"):
        counted_rounds("adalomo", ("tall.weight",), 3)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("name", FOR_ALL)
def test_state_is_that_of_the_rank_that_has_most(name, world):
    with torch.device("meta"):
        rule = Rule(name, Model())
    rule.matrices.pop("experts.up")
    held = []
    for rank in range(world):
        total = 0
        for p in (dict(Model().named_parameters())[key] for key in NAMES):
            shard = Shard.of_rank(tuple(p.shape), rank, world)
            total += memory.nbytes(
                zeros(stepping(name, p).state_spec(shard), torch.empty(len(shard)))
            )
        held.append(total)
    assert rule.state_bytes(dict.fromkeys(NAMES, world), world) == max(held)


# Buckets.


def small(dtype=torch.bfloat16):
    return llama(SMALL, dtype, torch.device("meta"))


@pytest.mark.parametrize("world, size, stage", [(2, 0, 3), (7, 2**14, 3), (64, 2**20, 2)])
def test_gradients_are_sent_once_with_their_padding(world, size, stage):
    model = small()
    params = dict(model.named_parameters())
    found = counting.reduced(model, giants.backward, set(params), world, size, stage)
    assert sorted(name for bucket in found for name in bucket.params) == sorted(params)
    for bucket in found:
        padded = [-(-params[name].numel() // world) * world for name in bucket.params]
        votes = len(padded) * world
        assert sum(bucket.gradients) == 2 * (sum(padded) + votes)
        assert len(padded) == 1 or sum(padded) <= size
        assert sum(bucket.published) == (2 * sum(padded) if stage == 2 else 0)
    if stage == 3:  # in the order of autograd; else in that of all ranks
        assert found[0].params[0] == "lm_head.weight"
        assert found[-1].params[-1] == "model.embed_tokens.weight"
    if size == 0:
        assert len(found) == len(params)
    agreed = sum(len(bucket.agreed) for bucket in found)
    assert agreed == 0 if stage == 3 else agreed >= len([b for b in found if b.params])


CASES = [("AdaLomo", 3, 2), ("CAME", 3, 3), ("GaLoreAdamW", 2, 2)]  # optimizer, stage, ranks
BUCKET = 2**13


def real_calls():
    """Counts of what the first of real ranks calls in its second step, by case."""

    def job(sizes, optimizer, stage):
        zero = {"stage": stage, "reduce_bucket_size": BUCKET}
        config = {"zero_optimization": zero, "optimizer": {"type": optimizer}}
        engine, gradients = comm.engine_of(sizes, config)

        def step(tokens):
            engine.backward(engine(tokens, labels=tokens).loss)
            engine.step()

        return step, comm.Step([], gradients, [])

    ranks.alike = lambda *_: lambda: True  # is not counted
    Stepper.voted_params = lambda _, params: VotedParams(host=set(params))  # all, as it is counted
    found = {}
    for case in CASES:
        optimizer, stage, world = case
        real = comm.on_ranks(
            world,
            comm.counted,
            lambda sizes, _, o=optimizer, s=stage: job(sizes, o, s),
            SMALL,
            8,
            0,
        )
        found[case] = Counter((c.kind, c.nbytes) for c in comm.optimizers(real.calls))
    for name, (world, job) in REAL.items():
        real = comm.on_ranks(world, comm.counted, job, SMALL, 8, BUCKET)
        found[name] = Counter((c.kind, c.nbytes) for c in comm.optimizers(real.calls))
    return found


def real_fsdp2(sizes, bucket):
    """A step of CAME on a Llama that FSDP2 has cut."""
    model = llama(sizes, torch.float32, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ds_ext.CAME(model.parameters())
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=bucket)

    def step(tokens):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, comm.Step([], 0, [])


WIDTHS = (12, 20, 12, 8, 12)  # of a pipeline's linear layers, two on each stage
MICRO_BATCHES = 3
SMALLER = 500  # reduce_bucket_size of the pipeline


def real_pipeline(_, __):
    """A step of AdaLomo by the first stage of two."""
    layers = [LayerSpec(nn.Linear, a, b) for a, b in itertools.pairwise(WIDTHS)]
    net = PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdaLomo", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": SMALLER},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)

    def step(_):
        x = torch.ones(2, WIDTHS[0])
        engine.train_batch(iter([(x, x)] * MICRO_BATCHES))

    return step, comm.Step([], 0, [])


REAL = {"fsdp2": (3, real_fsdp2), "pipeline": (4, real_pipeline)}


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """``real_calls`` of a process that has not run backward itself, and so can be forked."""
    out = tmp_path_factory.mktemp("scale") / "calls.pt"
    code = "import sys, torch; from tests.unit import test_scale as t; "
    code += "torch.save(t.real_calls(), sys.argv[1])"
    apart.python("-c", code, str(out), timeout=300)
    return torch.load(out, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-stage{case[1]}")
def test_all_calls_are_those_of_real_ranks(case, called, monkeypatch):
    optimizer, stage, world = case
    monkeypatch.setitem(giants.MODELS, "small", giants.Giant(SMALL))
    monkeypatch.setattr(giants.Giant, "make", lambda self: small(torch.float32))
    step = Counted("small", world, BUCKET, stage).step(optimizer)
    calls = [call for bucket in step for call in bucket.calls]
    assert Counter((call.kind, call.nbytes) for call in calls) == called[case]
    assert len(calls) > 20


@pytest.mark.slow
def test_fsdp2s_calls_are_those_of_real_ranks(called, monkeypatch):
    monkeypatch.setitem(giants.MODELS, "small", giants.Giant(SMALL))
    monkeypatch.setattr(giants.Giant, "make", lambda self: small(torch.float32))
    counted = fsdp2.FullySharded("small", REAL["fsdp2"][0], BUCKET)
    calls = [call for bucket in counted.step("CAME") for call in bucket.calls]
    calls += counted.gathers
    assert Counter((call.kind, call.nbytes) for call in calls) == called["fsdp2"]
    assert len(calls) > 20


@pytest.mark.slow
def test_calls_of_a_stage_are_those_of_real_ranks(called):
    rule, found = stage_of_linears(everyone=REAL["pipeline"][0])
    calls = [call for bucket in found for call in rule.of(bucket)[1].calls]
    assert Counter((call.kind, call.nbytes) for call in calls) == called["pipeline"]
    assert len(calls) > 10


def stage_of_linears(everyone, zero=1, name="adalomo"):
    """The rules and buckets of the first of two stages of linear layers."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)))
    own = [name for name, _ in model.named_parameters() if name[0] in "01"]

    def backward(model):
        giants.in_order(["1.bias", "1.weight", "0.bias", "0.weight"], model)

    among = everyone // 2
    found = staged.kept(model, own, backward, among, everyone, SMALLER, zero, MICRO_BATCHES)
    return Rule(name, model), found


@pytest.mark.parametrize("zero", [0, 1])
def test_a_stage_sums_statistics_over_its_own_ranks_and_the_norm_over_all(zero):
    rule, found = stage_of_linears(128, zero)
    step = [rule.of(bucket)[1] for bucket in found]
    elements = sum(-(-n // 64) * 64 for n in (12 * 20, 20, 20 * 12, 12))
    if zero == 0:
        elements = 12 * 20 + 20 + 20 * 12 + 12
    assert sum(map(sum, (b.gradients for b in step))) == 4 * elements * MICRO_BATCHES
    assert {b.summed_by for b in step if b.gradients} == {REDUCE_SCATTER if zero else ALL_REDUCE}
    rounds = [(b.ranks, b.rounds) for b in step if b.rounds]
    assert rounds[0] == (128, (8 * 2 * 4,))  # the sums of squares of all stages' parameters
    assert {n for n, _ in rounds[1:]} == ({64} if zero else set())
    stepped = [name for b in found for name in b.stepped]
    assert stepped == (["0.weight", "0.bias", "1.weight", "1.bias"] if zero else [])
    assert sum(map(sum, (b.published for b in step))) == (4 * elements if zero else 0)
    last = max(i for i, b in enumerate(step) if b.gradients)
    assert last < min(i for i, b in enumerate(step) if b.rounds)  # nothing is stepped before


def test_stages_end_by_the_schedule_of_one_forward_one_backward(monkeypatch):
    monkeypatch.setitem(giants.MODELS, "tiny", giants.Giant(SMALL))
    counted = staged.Staged("tiny", 8, 2**14, 1, 2, 5)
    step = counted.step("AdaLomo")
    work = giants.MODELS["tiny"].work(giants.made("tiny")[0])
    forward = sum(work[name] for name in counted.own) * 2 / 5  # two ranks' tokens, five times
    ready = counted.ready(step, 1.0)
    assert ready[-1] == pytest.approx((5 + 2 - 1) * 3 * forward)
    assert ready == sorted(ready)
    assert 2 * 3 * forward - 2 * forward < ready[0] <= 2 * 3 * forward  # in the first backward
    free = GIVEN._replace(link=Link(0.0, math.inf))
    found = outlook.times(counted, "AdaLomo", free)
    assert found.step == pytest.approx(counted.ready(step, 2 * 4096 / 4e14)[-1])
    assert found.rounds == 0
    late = outlook.times(counted, "AdaLomo", GIVEN)
    messages = [links.messages(ALL_REDUCE, b.ranks, TREE) for b in step for _ in b.rounds]
    assert late.rounds == pytest.approx(5e-6 * sum(messages), rel=0.1)  # without what is published
    assert late.step - late.rest == pytest.approx(late.rounds)  # none is hidden


@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2_spares_a_round_as_real_ranks_do(world):
    """Those are in tests/distributed/test_fsdp2_beside.py."""

    def backward(model):
        model(torch.zeros(5, 6)).sum().backward()

    with torch.device("meta"):
        model = Matrices()
    rules = {n: Rule(n, model, dtensors.rows_of) for n in ("adalomo", "adafactor", "came")}
    found = fsdp2.reduced(model, list(model), backward, world, 10**6)
    assert [b.gradients for b in found.buckets] == [(4 * 6 * world * -(-6 // world),)] * 4
    assert [b.stepped for b in found.buckets[:-1]] == [()] * 3
    assert found.buckets[-1].stepped == tuple(f"{i}.weight" for i in (3, 2, 1, 0))
    rounds = {n: sum(len(r.of(b)[1].rounds) for b in found.buckets) for n, r in rules.items()}
    assert rounds == {"adalomo": 1, "adafactor": 1, "came": 2}
    assert len(found.gathers) == 2 * 4


@pytest.mark.slow
def test_ways_to_spread_a_model_stand_side_by_side(monkeypatch):
    monkeypatch.setitem(giants.MODELS, "tiny", giants.Giant(SMALL))
    args = argparse.Namespace(model="tiny", ranks=128, bucket=2**12, stages=2, micro_batches=[2, 4])
    found = list(side_by_side.spreads(args))
    given = [GIVEN, GIVEN._replace(algorithm=RING)]
    sends = {s.name: side_by_side.sends(s, "CAME") for s in found}
    times = {s.name: side_by_side.timed(s, "CAME", given) for s in found}
    assert len(sends) == len(times) == 7
    few, many = (sends[f"2 stages, ZeRO 1, {n} micro-batches"] for n in (2, 4))
    assert many["gradients, GB sent"] == 2 * few["gradients, GB sent"]
    rounds = {name: row["rounds"] for name, row in sends.items()}
    assert many["rounds"] == few["rounds"] > rounds["2 stages, ZeRO 0, 4 micro-batches"] == 1
    assert rounds["FSDP2"] <= rounds["FSDP2, HSDP of 64"] < rounds["ZeRO-3"]
    assert all(0 < row["rounds, s, tree"] < row["rounds, s, ring"] for row in times.values())


@pytest.mark.parametrize("world", [2, 8, 64])
def test_the_computed_bytes_of_muon_are_the_counted_ones(world, monkeypatch):
    """On 64 ranks, cuts split rows."""
    monkeypatch.setitem(giants.MODELS, "tiny", giants.Giant(SMALL))
    model = giants.made("tiny")[0]
    rules = memory.rules_of(OPTIMIZERS["muon"], model, {})
    matrices, others = muon_cost.divided(memory.shapes_of(model), rules)
    assert len(matrices) == 2 * 7
    for bucket in (2**12, 2**20):
        calls = muon_cost.ds_ext(matrices, others, world, bucket).calls
        step = Counted("tiny", world, bucket).step("Muon")
        computed = {kind: sum(n for k, n in calls if k == kind) for kind, _ in calls}
        assert computed[ALL_REDUCE] + counting.NORM == sum(n for b in step for n in b.rounds)
        votes = 2 * world * sum(len(b.params) for b in step)
        assert computed[REDUCE_SCATTER] + votes == sum(n for b in step for n in b.gradients)


def deepspeeds_muon(sizes, bucket):
    """What DeepSpeed's Muon calls on a rank: for gradients, and when it steps matrices."""

    class FusedAdam:  # DeepSpeed would build it
        def __init__(self, *args, **kwargs):
            raise RuntimeError("not built")

    deepspeed.ops.adam.FusedAdam = FusedAdam
    original_muon = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    original_muon.muon_update = lambda grad, *args, **kwargs: grad  # which torch would compile
    zero = {"stage": 3, "reduce_scatter": False, "reduce_bucket_size": bucket}
    config = {"zero_optimization": zero, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}}
    engine, _ = comm.engine_of(sizes, config)
    tokens, step = torch.zeros(1, 8, dtype=torch.long), engine.optimizer
    apply, found = step._apply_muon_to_accumulated_grads, []

    def noting():
        before = len(calls)
        apply()
        found.extend(calls[before:])

    step._apply_muon_to_accumulated_grads = noting
    with collectives.noted() as calls:
        engine.backward(engine(tokens, labels=tokens).loss)
        gradients = [(c.kind, c.nbytes) for c in calls if c.kind == ALL_REDUCE]
        engine.step()
    return gradients, Counter((c.kind, c.nbytes) for c in found)


MUONS = [(2, 2**15), (3, 2**15), (2, 2**20)]  # ranks, reduce_bucket_size


def real_muons():
    return [comm.on_ranks(world, deepspeeds_muon, SMALL, bucket) for world, bucket in MUONS]


@pytest.mark.slow
def test_the_computed_calls_of_deepspeeds_muon_are_those_of_real_ranks(tmp_path):
    code = "import sys, torch; from tests.unit import test_scale as t; "
    code += "torch.save(t.real_muons(), sys.argv[1])"
    apart.python("-c", code, str(tmp_path / "calls.pt"), timeout=300)
    real = torch.load(tmp_path / "calls.pt", weights_only=False)
    model = llama(SMALL, torch.float32, torch.device("meta"))
    rules = memory.rules_of(OPTIMIZERS["muon"], model, {})
    given = muon_cost.divided(memory.shapes_of(model), rules)
    for (world, bucket), (gradients, calls) in zip(MUONS, real, strict=True):
        (_, whole), *computed = muon_cost.deepspeed(*given, world, bucket).calls
        assert sum(n for _, n in gradients) == 2 * whole  # fp32, not bf16
        assert calls == Counter((kind, 2 * n) for kind, n in computed)


def test_ranks_beyond_the_rows_of_a_matrix_have_nothing_and_add_up_alike():
    with torch.device("meta"):
        rule = Rule("came", Model(), dtensors.rows_of)
    matrix = rule.matrices["wide.weight"][0]
    held = [len(matrix.shard(rank, 16, rule.cut)) for rank in range(16)]
    assert held == [50] * 9 + [0] * 7
    assert len(rule.rounds(matrix, 16)[1]) == 2


def test_the_models_are_those_they_are_called():
    llama_70b, whole, shared = (giants.made(name)[0] for name in giants.MODELS)
    shapes = {name: tuple(p.shape) for name, p in llama_70b.named_parameters()}
    assert shapes == memory.shapes_of(models.skeleton(models.config("llama-70b")))
    assert sum(p.numel() for p in whole.parameters()) == 140_620_634_112
    experts = {n: p.shape for n, p in whole.named_parameters() if giants.is_expert(n)}
    assert len(experts) == 2 * 56 and {len(shape) for shape in experts.values()} == {3}
    for name, p in shared.named_parameters():
        assert p.shape == ((1, *experts[name][1:]) if name in experts else p.shape)
    active = [giants.MODELS[name].work(giants.made(name)[0]) for name in giants.MODELS]
    assert sum(active[0].values()) == sum(p.numel() for p in llama_70b.parameters())
    assert sum(active[1].values()) == sum(active[2].values()) == pytest.approx(39.15e9, rel=1e-3)


@pytest.mark.slow
def test_experts_sum_over_their_own_ranks():
    step = Counted("8x22b, EP 8", 64, 2**24).step("LOMO")
    ranks = {giants.is_expert(name): bucket.ranks for bucket in step for name in bucket.params}
    assert ranks == {True: 8, False: 64}
    assert len({giants.is_expert(name) for name in step[0].params}) == 1
    places = [bucket.place for bucket in step]
    assert places == sorted(places) and places[-1] == 507
    whole = Counted("8x22b", 64, 2**24).step("LOMO")
    assert {bucket.ranks for bucket in whole} == {64}
    expert = next(bucket for bucket in step if bucket.ranks == 8 and bucket.params)
    (summed,) = giants.made("8x22b, EP 8")[1]["adalomo"].of(expert)[1].rounds
    assert summed == 4 * (6144 + 16384 + 16384 + 1)  # rows, columns twice, RMS(p)


# The model of time.

LINK = Link(latency=1e-3, bandwidth=1e6)


@pytest.mark.parametrize(
    "kind, ranks, algorithm, expected",
    [
        (ALL_REDUCE, 8, RING, 14e-3 + 2 * 7 / 8 * 2),
        (ALL_REDUCE, 8, TREE, 6e-3 + 2 * 7 / 8 * 2),
        (REDUCE_SCATTER, 8, RING, 7e-3 + 7 / 8 * 2),
        (REDUCE_SCATTER, 8, TREE, 3e-3 + 7 / 8 * 2),
        (ALL_REDUCE, 1, TREE, 0),
    ],
)
def test_what_a_collective_takes(kind, ranks, algorithm, expected):
    found = links.seconds(Call("", kind, 2 * 10**6), ranks, LINK, algorithm)
    assert found == pytest.approx(expected)


def bucket(gradients, *sums, place=0, ranks=4):
    return Bucket(ranks, (), place, (), (gradients,), sums, ())


def test_a_fit_finds_the_link_that_made_the_times():
    sizes = (2**10, 2**16, 2**24)
    calls = [(ranks, Call("", ALL_REDUCE, n)) for ranks in (2, 3) for n in sizes]
    made = [Sample(r, c.nbytes, links.seconds(c, r, LINK, RING)) for r, c in calls]
    found, errors = links.fit(made)
    assert found == pytest.approx(LINK) and errors == pytest.approx([0] * 6, abs=1e-9)
    slower = [made[0]._replace(seconds=2 * made[0].seconds), *made[1:]]
    assert max(map(abs, links.fit(slower)[1])) > 0.2
    with pytest.raises(RuntimeError, match="measure again"):
        links.fit([Sample(2, n, 1 / n) for n in sizes])


@pytest.mark.parametrize(
    "ready, in_line, beside",
    [
        ([0, 0, 0], 9 + 12, 3 + 12),  # gradients wait for rounds, or all but the first do not
        ([10, 10, 10], 10 + 21, 10 + 3 + 12),
        ([0, 10, 20], 20 + 3 + 4 + 4, 20 + 4 + 4),  # those of the second run beside the third
        ([0, 3, 6], 21, 3 + 4 + 4 + 4),
    ],
)
def test_the_order_of_a_step(ready, in_line, beside):
    step = [bucket(3, 2, 2)] * 3
    takes = lambda call, ranks: call.nbytes  # noqa: E731
    assert links.chain(step, takes, ready, beside=False) == in_line
    assert links.chain(step, takes, ready, beside=True) == beside


def test_the_longest_chain_counts_collectives():
    assert links.longest([bucket(1, 1, 1)] * 5) == 1 + 5 * 2
    assert links.longest([bucket(1)] * 5) == 5
    assert links.longest([bucket(1, 1)] * 4 + [bucket(1, 1, 1)]) == 1 + 4 + 2


@pytest.mark.slow
def test_gloo_among_real_ranks_is_measured():
    samples = links.measure(2, (2**12, 2**22))
    assert [(s.ranks, s.nbytes) for s in samples] == [(2, 2**12), (2, 2**22)]
    assert 0 < samples[0].seconds < samples[1].seconds < 10


GIVEN = outlook.Given(Link(5e-6, 50e9), TREE, 4096, 4e14)


@pytest.mark.slow
def test_times_of_a_step():
    counted = Counted("llama-70b", 64, 2**24)
    found = outlook.times(counted, "LOMO", GIVEN)
    compute = 6 * 68_976_648_192 * 4096 / 4e14
    step = counted.step("LOMO")
    last = step[-2].gradients[0] * 63 / 64 / 50e9 + 18 * 5e-6  # sent when backward has ended
    assert step[-2].params[-1] == "model.embed_tokens.weight"
    assert found.step == pytest.approx(compute + last, rel=1e-6)
    assert found.rest == pytest.approx(found.step, abs=1e-4) and found.rounds < 1e-4
    with_rounds = outlook.times(counted, "CAME", GIVEN)
    assert with_rounds.rest < with_rounds.step and with_rounds.gradients == found.gradients
    slow = GIVEN._replace(link=Link(5e-3, 50e9))
    assert outlook.times(counted, "CAME", slow).dominated
    assert not with_rounds.dominated


@pytest.mark.parametrize(
    "gradients, rounds, step, dominated",
    [(1, 1.5, 100, True), (10, 1.5, 100, False), (20, 11, 100, True), (20, 9, 100, False)],
)
def test_rounds_dominate(gradients, rounds, step, dominated):
    assert outlook.Times(gradients, rounds, step, step).dominated == dominated


@pytest.mark.slow
def test_the_least_number_of_ranks_is_found(monkeypatch):
    monkeypatch.setitem(giants.MODELS, "tiny", giants.Giant(SMALL))
    counted = [Counted("tiny", ranks, 2**14) for ranks in (8, 2, 4)]
    slow = GIVEN._replace(tokens=10**10)  # computes for seconds
    given = {str(us): slow._replace(link=Link(us * 1e-6, 1e6)) for us in (1, 10**6)}
    rows = {row["optimizer"]: row for row in outlook.dominating(counted, given)}
    expected = {}
    for name, how in given.items():
        found = {c.ranks: outlook.times(c, "CAME", how).dominated for c in counted}
        expected[name] = min((n for n in found if found[n]), default=None)
    assert expected == {"1": None, "1000000": 2}
    assert rows["CAME"]["1000000"] == "2" and rows["CAME"]["1"].startswith("> 8 (")


def test_rows_stay_whole_up_to_as_many_ranks_as_divide_them():
    found = {row["parameter"]: row for row in scale.whole_rows(["llama-70b", "8x22b, EP 8"])}
    assert found["32000 × 8192"]["whole rows up to ranks"] == 256
    assert found["1024 × 8192"] == {
        "model": "llama-70b",
        "parameter": "1024 × 8192",
        "of these": 160,
        "whole rows up to ranks": 1024,
    }
    assert found["1 × 32768 × 6144"]["whole rows up to ranks"] == 8 * 32768
    rules = giants.made("llama-70b")[1]
    embedding, values = (
        rules["adalomo"].matrices[name][0]
        for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight")
    )
    for matrix, most in ((embedding, 256), (values, 1024)):
        for name, rounds_whole in (("adalomo", 1), ("came", 2)):
            taken = [len(rules[name].rounds(matrix, n)[1]) for n in (most, 2 * most)]
            assert taken == [rounds_whole, rounds_whole + 1]


def test_groups_send_gradients_to_their_copies():
    takes = outlook.in_groups(GIVEN, 4096)
    inner, between = 2 * 10**9 * 63 / 64 / 50e9, 2 * 63 / 64 * 2 * 10**9 / 64 / 50e9
    latency = (6 + 2 * 6) * 5e-6
    assert takes(Call("", REDUCE_SCATTER, 2 * 10**9), 64) == pytest.approx(
        inner + between + latency
    )
    assert takes(Call("", ALL_REDUCE, 0), 64) == pytest.approx(12 * 5e-6)


@pytest.mark.slow
def test_groups_of_ranks_shorten_rounds_by_rings_and_change_little_by_trees(monkeypatch):
    monkeypatch.setitem(giants.MODELS, "tiny", giants.Giant(SMALL))
    monkeypatch.setattr(outlook, "JUDGED", ("AdaLomo",))
    slow = GIVEN._replace(link=Link(5e-6, 1e12))  # latency alone
    rows = list(outlook.by_groups(Counted("tiny", 256, 2**14), slow, slow._replace(algorithm=RING)))
    assert [row["shard_size"] for row in rows] == ["all", 64]
    whole, grouped = (row["rounds, s, ring"] for row in rows)
    assert grouped < whole / 4


def test_all_that_is_judged_can_be_counted_and_drawn():
    assert set(outlook.JUDGED) <= set(giants.STEPS)
    assert len(scale.COLORS) == len(outlook.JUDGED)
    assert len(scale.STYLES) >= len(giants.MODELS)


def test_collectives_are_as_before_when_they_are_noted_no_more():
    methods = {name: vars(dist.ProcessGroup)[name] for name in ("broadcast", "allreduce")}
    with collectives.noted():
        assert all(vars(dist.ProcessGroup)[name] is not own for name, own in methods.items())
    assert all(vars(dist.ProcessGroup)[name] is own for name, own in methods.items())
