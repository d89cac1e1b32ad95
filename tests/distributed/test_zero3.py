"""Real ranks under ZeRO-3 against the authors' optimizers in one process, on the same batches.

Each world (1, 2 and 3 processes over gloo) is started once and runs all cases of worker.py.
"""

from collections import Counter

import pytest
import torch
import transformers

from tests.common import models
from tests.common.authors import Reference
from tests.distributed.worker import CASES, STEPS
from tests.support import of

pytestmark = pytest.mark.slow


ROUNDS = {"lomo": 0, "adalomo": 2, "adafactor": 2, "came": 3, "lamb": 1}
EXACT = [name for name, case in CASES.items() if case.dtype == "fp32" and "groups" not in name]


def shown(name: str) -> list[str]:
    """The features that a case shows."""
    case = CASES[name]
    usual = case.checkpointing is None and not case.zero_init
    said = {
        "fp32, each optimizer against its authors' code": usual,
        "tied, shared, unused weights; 0 to 4 dimensions": usual and case.tensors and case.odd,
        "models built under `zero.Init`": case.zero_init,
        "weight decay by the JSON config": not case.client,
        "reentrant activation checkpointing": case.checkpointing == "reentrant",
        "non-reentrant activation checkpointing": case.checkpointing == "nonreentrant",
    }
    return [feature for feature, holds in said.items() if holds]


@pytest.mark.supports(shown, **of(CASES))
@pytest.mark.parametrize("name", EXACT)
def test_equals_the_authors(run, name):
    world, results = run
    got, case = results[name], CASES[name]
    assert "error" not in got, got["error"]
    reference = Reference(case, got["decays"])
    before = {n: p.detach().clone() for n, p in reference.model.named_parameters()}
    for step in range(STEPS):
        reference.step(models.batch(step, world), case.step(step))
    after = {n: p.detach() for n, p in reference.model.named_parameters()}
    square, square_error = 0.0, 0.0
    for n in before:
        assert torch.equal(got["before"][n], before[n])
        update = (after[n] - before[n]).norm()
        error = (got["after"][n] - after[n]).norm()
        # fp32 itself cannot tell apart what lies within its rounding of the weight at each step
        resolution = STEPS * 2**-24 * after[n].norm()
        assert error <= max(1e-5 * update, resolution), (n, float(error), float(update))
        square, square_error = square + update**2, square_error + error**2
    assert square_error**0.5 <= 1e-5 * square**0.5
    if reference.norms:
        assert got["norms"] == pytest.approx(reference.norms, rel=1e-4)
    untouched = {"unused.weight", "unused.bias", "frozen.weight", "frozen.bias"}
    untouched |= set() if case.odd else {"odd.weight"}
    moved = {n for n in after if not torch.equal(got["after"][n], before[n])}
    assert moved == set(after) - untouched


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_hold_the_same_bits(run, name):
    assert run[1][name]["identical"]


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_steps_once_a_step(run, name):
    for param, steps in run[1][name]["steps"].items():
        assert steps == (STEPS // 2 if param == "odd.weight" else STEPS), param
    assert len(run[1][name]["steps"]) == sum(map(CASES[name].is_used, run[1][name]["before"]))


@pytest.mark.parametrize("name", CASES)
def test_gradients_alive_are_one_bucket_and_one_parameter(run, name):
    world, results = run
    model = models.make(None, CASES[name].tensors)
    sizes = [-(-p.numel() // world) * world for p in model.parameters()]
    largest = max(sizes)
    assert results[name]["kept"] == 0
    most = max(CASES[name].bucket, largest) + largest
    if world > 1 and CASES[name].stage in (3, None):  # the bucket before is on its way
        most += max(CASES[name].bucket, largest)
    assert 0 < results[name]["alive"] <= most


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].checkpointing is None])
def test_gradients_are_reduce_scattered_once_and_only_statistics_all_reduced(run, name):
    world, results = run
    sent = results[name]["sent"]
    if world == 1:
        assert {kind for kind, _ in sent} == {"bucket"}
        return
    model = models.make(None, CASES[name].tensors)
    used = [p for n, p in model.named_parameters() if CASES[name].is_used(n)]
    totals = {kind: sum(n for k, n in sent if k == kind) for kind, _ in sent}
    calls = Counter(kind for kind, _ in sent)
    totals.pop("bucket")
    if not CASES[name].stage:
        gradients = sum(p.numel() for p in used)
        assert totals == {"all_reduce": gradients + len(used)}  # and a vote a parameter
        assert calls["all_reduce"] == calls["bucket"]
        return
    assert calls["reduce_scatter"] == calls["bucket"]
    if CASES[name].rule != "galoreadamw":  # a renewal of the basis takes more
        assert calls["all_reduce"] <= ROUNDS[CASES[name].rule] * calls["bucket"] + 1  # and the norm
    gradients = sum(-(-p.numel() // world) * world for p in used)
    assert totals["reduce_scatter"] == gradients + world * len(used)
    statistics = 2 * sum(sum(p.shape) + 2 for p in used)
    assert totals.get("all_reduce", 0) <= 2 * statistics


@pytest.mark.supports("own settings for a parameter group", stage=3, optimizer="AdaLomo")
def test_groups_have_their_own_hyper_parameters(run):
    world, results = run
    got = results["adalomo-groups"]
    model = models.make()
    params = list(model.parameters())
    settings = [{"lr": 0.02}, {"lr": 0.01, "weight_decay": 0.2}, {"lr": 0.005}]
    settings[2]["clip_threshold"] = 0.5
    optimizer = transformers.Adafactor(
        [{"params": params[i::3]} | s for i, s in enumerate(settings)], relative_step=False
    )
    before = [p.detach().clone() for p in params]
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model(t, step=step) for t in models.batch(step, world)) / world).backward()
        optimizer.step()
    for (n, p), b in zip(model.named_parameters(), before, strict=True):
        assert (got["after"][n] - p).norm() <= 2e-5 * (p - b).norm(), n


@pytest.mark.supports("bf16 weights", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("stage", range(4))
def test_bf16_follows_fp32(run, stage):
    got = run[1][f"adalomo-bf16-stage{stage}"]
    exact = run[1]["adalomo-authors"]
    for n, p in got["after"].items():
        assert p.dtype == torch.bfloat16
        update = (exact["after"][n] - exact["before"][n]).norm()
        resolution = 2**-9 * exact["after"][n].norm()
        assert (p.float() - exact["after"][n]).norm() <= 0.3 * update + resolution, n


MESSAGES = {
    "unknown": ["optimizer.params.weight_decy", '"weight_decay"'],
    "type": ["optimizer.params.lr", "'fast'", "a number >= 0"],
    "negative": ["optimizer.params.lr", "-1.0", "a number >= 0"],
    "pair": ["optimizer.params.betas", "[0.9, 0.999]", "a list of 3"],
    "clipping": ["gradient_clipping", "-1.0", ">= 0"],
    "accumulation": ["gradient_accumulation_steps = 2", "ds_ext.gradient_policy"],
    "derived accumulation": ["gradient_accumulation_steps = 6", "ds_ext.gradient_policy"],
    "section": ["ds_ext.clip_mod", '"clip_mode"'],
    "scheduler": ["relative_step", "scheduler"],
}


@pytest.mark.parametrize("case", MESSAGES)
def test_bad_configs_are_refused_on_every_rank(run, case):
    world, results = run
    messages = results["refusals"][case]
    assert len(messages) == world
    for message in messages:
        assert all(part in message for part in MESSAGES[case]), message


def test_a_gradient_that_is_not_finite_reaches_no_weight_on_any_rank(run):
    world, results = run
    got = results["not finite"]
    assert got["skipped"] == [1] * world
    assert got["changed"] == {"other", "twice"} and got["finite"]
    assert got["state"] == {"bad": 0, "other": 1, "twice": 1}


def test_a_trainable_parameter_outside_the_optimizer_keeps_no_gradient(run):
    assert run[1]["outside"] == {"kept": 0, "changed": {"weight"}}


def test_target_modules_choose_what_galore_projects(run):
    got = run[1]["galore json"]
    assert "error" not in got, got["error"]
    assert {n for n, rank in got["ranks"].items() if rank == 3} == {"up.weight", "down.weight"}
    assert {rank for rank in got["ranks"].values()} == {3, None}
    assert "target_modules" in got["message"] and "upp" in got["message"]


def test_a_second_backward_before_step_is_an_error(run):
    assert "second gradient" in run[1]["second backward"]


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(run):
    got = run[1]["resume"]
    assert "error" not in got, got["error"]
    assert got["equal"]
    assert "CAME" in got["message"] and "LOMO" in got["message"]
