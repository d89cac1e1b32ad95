"""DeepSpeed's PipelineModule on real ranks against the same layers in one process."""

from dataclasses import replace

import pytest
import torch

from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common import engines
from tests.common.authors import INDEPENDENT, ordinary
from tests.common.by_role import MATRICES
from tests.common.choose import params, spread
from tests.common.hypers import FOR_ALL, TRAINED, changed
from tests.common.plain import mean_step
from tests.common.updates import check, error
from tests.distributed import pipelines_jobs
from tests.distributed.pipelines_jobs import ROWS, STEPS, Chain, Run

HYPERS = changed(TRAINED, galoreadamw={"nbits": 32})
CLIP = 0.7
WAYS = [(2, 2, 1), (4, 2, 0), (3, 3, 1), (2, 2, 0), (4, 2, 1), (3, 3, 0), (2, 1, 1)]
EXACT = [(rule, *way) for rule, *way in spread([r for r in FOR_ALL if r in INDEPENDENT], WAYS)]
EXACT += [("adalomo", *way) for way in WAYS if ("adalomo", *way) not in EXACT]
QUICK = [("adalomo", 2, 2, 1)]
CLOSE = {"flashadamw": 1e-2}  # codes of 8 bits jump where gradients differ in their last bits
CLOSE |= {"muon": 1e-4}  # its iteration in fp32: test_muon.py
DTYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
DTYPES |= {"fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}}
FROZEN = {"4.frozen.weight", "4.frozen.bias", "4.unused.weight", "4.unused.bias"}


def run_of(rule: str, stages: int, zero: int, **more) -> Run:
    hypers = {**HYPERS[rule], "weight_decay": 0.1}
    return Run(rule, hypers, stages, zero, {"gradient_clipping": CLIP} | more)


def merged(results: list[dict], key: str) -> dict[str, torch.Tensor]:
    """Tensors by name of all stages, which have the same bits wherever they are."""
    found: dict[str, torch.Tensor] = {}
    for result in results:
        for name, value in result[key].items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def chain(before: dict[str, torch.Tensor], is_tied: bool = True) -> Chain:
    model = Chain(is_tied)
    model.load_state_dict(before, strict=False)
    assert {n for n, _ in model.named_parameters()} == before.keys()
    return model


@pytest.mark.supports("pipeline parallelism", stage="zero", optimizer="rule")
@pytest.mark.parametrize("rule, ranks, stages, zero", params(EXACT, QUICK))
def test_equals_the_authors(rule, ranks, stages, zero):
    client = bool(REGISTRY[rule].roles)  # a config would let another rule step some parameters
    run = replace(run_of(rule, stages, zero), client=client)
    results = worlds.once(ranks, pipelines_jobs.train, run)
    before, after = merged(results, "before"), merged(results, "after")
    model = chain(before)
    named = dict(model.named_parameters())
    groups = []
    for i in range(len(results[0]["groups"])):
        names = {n for result in results for n in result["groups"][i][2]}
        decay = results[0]["groups"][i][1]
        groups.append({"params": [named[n] for n in named if n in names], "weight_decay": decay})
    hypers = {k: v for k, v in HYPERS[rule].items() if k != "weight_decay"}
    optimizer = ordinary(rule, groups, hypers)
    losses = []

    def loss_of(model, step, part):
        losses.append(model(pipelines_jobs.rows(step).split(ROWS // 4)[part]))
        return losses[-1]

    alone = engines.alone(model, optimizer, loss_of, STEPS, 4, CLIP)
    means = torch.stack(losses).detach().view(STEPS, 4).mean(1).tolist()
    for result in results:
        assert result["losses"] == pytest.approx(means, rel=1e-5)
        assert result["norms"] == pytest.approx(alone.norms, rel=1e-5)
    check(after, alone.after, before, STEPS)
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    assert moved == named.keys() - FROZEN


# Ranks and stages of three runs, each of which goes on from the one before.
WAYS_ON = {
    "other stages": ((2, 2, 1), (1, 1, 0), (3, 3, 1)),
    "other ranks": ((2, 2, 0), (4, 2, 1), (2, 1, 1)),
}
RESUMED = [("came", "other stages")]
RESUMED += [case for case in spread(REGISTRY, [(way,) for way in WAYS_ON]) if case not in RESUMED]
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}}


@pytest.mark.supports(
    "pipelines: resume with other stages",
    stage=lambda way: [zero for *_, zero in WAYS_ON[way]],
    optimizer="rule",
)
@pytest.mark.parametrize("rule, way", params(RESUMED, [("came", "other stages")]))
def test_a_run_goes_on_with_other_stages_and_ranks(rule, way, tmp_path):
    def go_on(way, folder, first, last):
        ranks, stages, zero = way
        run = run_of(rule, stages, zero, scheduler=SCHEDULE)
        return worlds.run(ranks, pipelines_jobs.go_on, run, str(tmp_path / folder), first, last)

    whole = go_on((2, 2, 1), "whole", 0, 6)
    for i, own in enumerate(WAYS_ON[way]):
        results = go_on(own, "broken", 2 * i, 2 * i + 2)
        for result in results:
            assert result["steps"] == 2 * i + 2
            assert not i or result["client"] == {"saved after": 2 * i}
    before, after = merged(whole, "before"), merged(whole, "after")
    ended = merged(results, "after")
    roundings = {"adalomo": 2e-6} | CLOSE  # sums of ranks in another order, in each of six steps
    assert error(ended, after, before) <= roundings.get(rule, 1e-6)
    if way == "other stages":  # one pipeline all the time: its buffer counts micro-batches
        assert [float(b) for got in results for b in got["seen"].values()] == [6 * 4]
    assert results[0]["lr"] == pytest.approx(whole[0]["lr"])
    layers = [name for name in results[0]["files"] if name.startswith("layer_")]
    every = [f"layer_{i:02d}-model_states.pt" for i in (0, 1, 3, 4, 5, 6)]
    assert layers == every[: max(5, len(layers))]


POISONED = [(ranks, stages, zero, dtype) for ranks, stages, zero in WAYS[:3] for dtype in DTYPES]


@pytest.mark.parametrize("ranks, stages, zero, dtype", params(POISONED, [(2, 2, 1, "fp16")]))
def test_what_is_not_finite_on_one_stage_skips_the_step_on_all(ranks, stages, zero, dtype):
    run = run_of("adalomo", stages, zero, **DTYPES[dtype])
    for bad_stage in range(2 if stages == 2 else 1):
        data = ranks // stages - 1
        results = worlds.run(ranks, pipelines_jobs.faulty, run, bad_stage, data)
        for got in results:
            assert got["skipped"] == got["metrics"]["skipped_steps"] == 1
            assert not got["moved"][1] and all(got["moved"][i] for i in (0, 2, 3))
        told = [line for got in results for line in got["said"] if "not finite" in line]
        assert len(told) == 1 and f" {3 * bad_stage + 1}." in told[0]
        scales = [256.0, 128.0, 128.0, 128.0] if dtype == "fp16" else [1.0] * 4
        assert all(got["scales"] == scales for got in results)


@pytest.mark.parametrize("ranks, job", [(2, pipelines_jobs.refusals), (4, pipelines_jobs.unlike)])
def test_what_pipelines_cannot_do_is_refused_on_every_rank(ranks, job):
    worlds.run(ranks, job)


@pytest.mark.supports("pipelines: bf16, fp16", stage="zero", optimizer="AdaLomo")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "ranks, stages, zero", params([(2, 2, 1), (4, 2, 1), (3, 3, 0)], [(2, 2, 1)])
)
def test_sixteen_bits_follow_fp32(ranks, stages, zero, dtype):
    exact = worlds.once(ranks, pipelines_jobs.train, run_of("adalomo", stages, zero))
    got = worlds.run(ranks, pipelines_jobs.train, run_of("adalomo", stages, zero, **DTYPES[dtype]))
    after, before = merged(exact, "after"), merged(exact, "before")
    assert got[0]["norms"] == pytest.approx(exact[0]["norms"], rel=0.1)
    for n, p in merged(got, "after").items():  # tied weights have the same noise on both stages
        assert p.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float16)
        update = (after[n] - before[n]).norm()
        resolution = 2**-9 * after[n].norm()
        assert (p.float() - after[n]).norm() <= 0.3 * update + resolution, n


@pytest.mark.slow
def test_the_noise_of_rounding_does_not_depend_on_stages():
    def trained(stages):
        run = run_of("adalomo", stages, 1, **DTYPES["bf16"], gradient_clipping=0)
        results = worlds.run(stages, pipelines_jobs.train, replace(run, is_tied=False))
        return merged(results, "after")

    one, two, three = map(trained, (1, 2, 3))
    assert one.keys() == two.keys() == three.keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]) and torch.equal(weight, three[name]), name


CPU = {"offload_optimizer": {"device": "cpu"}, "stage": 1, "reduce_bucket_size": 300}
ALIKE = {"checkpointed": ("adalomo", {}, 1)}
ALIKE |= {"checkpointed non-reentrantly": ("adalomo", {"pipeline": {"use_reentrant": False}}, 1)}
ALIKE |= {"offloaded": ("came", {"zero_optimization": CPU}, 0)}


@pytest.mark.parametrize("name", params(ALIKE, ["checkpointed"]))
def test_what_changes_no_bits(name):
    rule, more, checkpointing = ALIKE[name]
    usual = worlds.once(2, pipelines_jobs.train, run_of(rule, 2, 1))
    run = replace(run_of(rule, 2, 1, **more), checkpointing=checkpointing)
    got = worlds.run(2, pipelines_jobs.train, run)
    for key in ("before", "after"):
        expected = merged(usual, key)
        for n, p in merged(got, key).items():
            assert torch.equal(p, expected[n]), n


def test_a_stage_may_have_nothing_to_train():
    losses, *others = worlds.run(3, pipelines_jobs.without_parameters)
    assert losses[-1] < losses[0] and others == [losses, losses]


def test_what_is_told_is_of_the_whole_model():
    results = worlds.once(2, pipelines_jobs.train, run_of("adalomo", 2, 1))
    for got in results:
        assert got["losses"] == results[0]["losses"] and got["norms"] == results[0]["norms"]
        assert got["averaged by DeepSpeed"] == 0
        assert got["evaluated"] == results[0]["evaluated"] > 0
        assert got["counts"] == (STEPS, STEPS * ROWS, 0)
        assert [g[:2] for g in got["groups"]] == [g[:2] for g in results[0]["groups"]]
        assert got["metrics"][-1]["clip_coefficient"] < 1
    assert results[1]["seen"] == [STEPS * 4] and not results[1]["said"]
    told = " ".join(results[0]["said"])
    assert 'policy "sharded"' in told and "by scaling the kept ones" in told
    assert "2 stages" in told


BY_ROLE = [(rule, *way) for rule, *way in spread([r for r in REGISTRY if REGISTRY[r].roles], WAYS)]
QUICK_BY_ROLE = [c for c in BY_ROLE if c[0] == "muon"]
BY_ROLE += [c for rule in MATRICES for z in (0, 1) if (c := (rule, 2, 2, z)) not in BY_ROLE]


@pytest.mark.supports("pipeline parallelism", stage="zero", optimizer="rule")
@pytest.mark.parametrize("rule, ranks, stages, zero", params(BY_ROLE, QUICK_BY_ROLE))
def test_a_config_steps_the_layers_of_all_stages_by_their_roles(rule, ranks, stages, zero):
    """As ``for_model`` does in one process, which other tests hold against the authors."""
    run = run_of(rule, stages, zero, gradient_clipping=0)
    results = worlds.run(ranks, pipelines_jobs.train, run)
    before, after = merged(results, "before"), merged(results, "after")
    model = chain(before)
    optimizer = OPTIMIZERS[rule].for_model(model, **run.hypers)
    for step in range(STEPS):
        mean_step(optimizer, [model(own) for own in pipelines_jobs.rows(step).split(ROWS // 4)])
    assert error(after, dict(model.named_parameters()), before) <= CLOSE.get(rule, 1e-5)
    steps = {name: n for got in results for name, n in got["steps"].items()}
    assert steps == dict.fromkeys(before.keys() - FROZEN, STEPS)


@pytest.mark.slow
def test_tied_weights_have_the_same_bits_on_stages_of_three_ranks():
    """Sums of three depend on their order, which depends on what travels with them."""
    run = replace(run_of("lamb", 2, 1), micro_batches=6)
    after = merged(worlds.run(6, pipelines_jobs.train, run), "after")
    tied = {f"tied_modules.tokens.{name}" for name in ("weight", "offset")}
    assert {name for name in after if "tied" in name} == tied
