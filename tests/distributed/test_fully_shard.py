"""FSDP2 on real ranks, against the authors' optimizers in one process with whole gradients."""

import functools
from typing import Any

import pytest
import torch

from tests import worlds
from tests.common import updates
from tests.common.authors import INDEPENDENT
from tests.common.by_role import MATRICES
from tests.common.choose import params
from tests.common.hypers import CLOSE, FOR_ALL
from tests.distributed import fully_shard_jobs, training_jobs
from tests.distributed.training_jobs import STEPS, Training
from tests.distributed.zero_jobs import HYPERS


def case(rule: str, how: str = "fused", **more: Any) -> Training:
    """A run by a policy, or by ``optimizer.step()`` alone if it is "plain"."""
    given = {"how": how} if how == "plain" else {"policy": how}
    return Training(rule, None, own=HYPERS[rule], bucket=300, dropout=0.0, **given | more)


CASES = {
    f"{rule}-{how}": case(rule, how) for rule in (*FOR_ALL, *MATRICES) for how in ("fused", "plain")
}
CASES["adalomo-sharded"] = case("adalomo", "sharded")
for kind in ("reentrant", "non-reentrant"):
    CASES[f"came-{kind}"] = case("came", checkpointing=kind)
    CASES[f"lomo-{kind}"] = case("lomo", "sharded", checkpointing=kind)
    CASES[f"muon-{kind}"] = case("muon", checkpointing=kind)
ALL = [(2, name) for name in CASES]
ALL += [(3, "adalomo-fused"), (3, "came-plain"), (3, "adalomo-sharded")]
# What `make test` runs: each policy, and rules of several kinds.
QUICK = {(2, name) for name in ("adamw-plain", "lomo-fused", "adalomo-sharded")}
QUICK |= {(2, name) for name in ("came-reentrant", "muon-fused")}
AUTHORS = "fp32, each optimizer against its authors' code"


def shown(name: str) -> list[str]:
    rule, kind = CASES[name].rule, CASES[name].checkpointing
    own = [AUTHORS] if rule in INDEPENDENT or rule in MATRICES else []
    if kind is not None:
        own.append(f"{kind} activation checkpointing")
    return [*own, "tied, shared, unused weights; 0 to 4 dimensions"]


UNTOUCHED = {"unused.weight", "unused.bias", "frozen.weight", "frozen.bias"}


@pytest.mark.supports(shown, stage="fsdp2", optimizer=lambda name: CASES[name].rule)
@pytest.mark.parametrize("ranks, name", params(ALL, QUICK.__contains__))
def test_equals_the_authors(ranks, name):
    case = CASES[name]
    got = worlds.once(ranks, fully_shard_jobs.train, case)[0]
    alone = training_jobs.alone(case, ranks, got, fully_shard_jobs.zoo())
    check(got, alone.after, CLOSE.get(case.rule, 1e-5))
    if case.how != "plain":
        assert got["norms"] == pytest.approx(alone.norms, rel=1e-4)
    in_backward = case.how != "plain" and case.policy == "fused"
    assert got["moved in backward"] == [in_backward] * STEPS
    assert got["identical"]
    halfway = {n: s for n, s in got["steps"].items() if s not in (0, STEPS)}
    assert halfway == {"odd.weight": STEPS // 2}


def check(got, expected, close, untouched=UNTOUCHED):
    """Compares weights with those of one process, which moves all but ``untouched``."""
    updates.check(got["after"], expected, got["before"], STEPS, close)
    still = {
        n for n, p in expected.items() if torch.equal(p.view_as(got["before"][n]), got["before"][n])
    }
    assert still == untouched


# How gradients are clipped and kept. Those that FSDP2 keeps over micro-batches are summed over the
# ranks with the last one; the others with each.
BY_STEP: dict[str, dict[str, Any]] = {
    "fused": {},
    "clipped": {"max_norm": 0.3},
    "sharded": {"max_norm": 0.3, "policy": "sharded"},
    "by value": {"clip_value": 0.003},
}
ACCUMULATED = [(name, by_fsdp, 2) for name in BY_STEP for by_fsdp in (True, False)]
# gradients are used up by the backward pass that brings them
ACCUMULATED = [c for c in ACCUMULATED if c[1] or c[0] == "sharded"]
ACCUMULATED += [(name, False, 1) for name in BY_STEP]
SEGMENTS = [(*c, None) for c in ACCUMULATED]
SEGMENTS += [("clipped", False, 1, "reentrant"), ("fused", True, 2, "reentrant")]
SEGMENTS += [("sharded", False, 2, "reentrant"), ("clipped", False, 1, "non-reentrant")]
SEGMENTS = [(*c, "lomo") for c in SEGMENTS] + [(*c, None, "muon") for c in ACCUMULATED]


def means(name: str, micro: int, checkpointing: str | None) -> list[str]:
    """What a way to clip, over so many micro-batches, is called."""
    if checkpointing is not None:
        return [f"{checkpointing} activation checkpointing"]
    said = {"clipped": 'clipping by norm, `"fused"`'}
    said |= {"sharded": 'clipping by norm, `"sharded"`', "by value": "clipping by value"}
    if micro == 1:
        return [said[name]] if name in said else []
    return ["gradient accumulation" + (" with clipping" if name in ("clipped", "sharded") else "")]


@pytest.mark.supports(means, stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize(
    "name, by_fsdp, micro, checkpointing, rule",
    params(
        SEGMENTS,
        {("clipped", False, 1, "reentrant", "lomo"), ("clipped", True, 2, None, "muon")},
    ),
)
def test_micro_batches_are_one_step_and_clipped_exactly(name, by_fsdp, micro, checkpointing, rule):
    run = Training(
        *(rule, None), **BY_STEP[name], accumulation=micro, checkpointing=checkpointing,
        own={"lr": 0.05, "weight_decay": 0.0}, bucket=300, dropout=0.0
    )  # fmt: skip
    got = worlds.run(2, fully_shard_jobs.train, run, True, by_fsdp)[0]
    _, expected, norms = training_jobs.alone(run, 2, got, fully_shard_jobs.apart())
    close = CLOSE.get(rule, 1e-5)
    check(got, expected, close, UNTOUCHED | {"offsets"})
    assert got["norms"] == pytest.approx(norms, rel=close) and got["identical"]
    assert sum(norm > 0.3 for norm in norms) > 1 and not got["held twice"]
    # what FSDP2 has kept cannot be measured first, so it waits for the step to be clipped
    waits = name == "sharded" or (name == "clipped" and micro > 1)
    assert got["moved in backward"] == ([False] * (micro - 1) + [not waits]) * STEPS


def test_what_comes_too_late_is_refused_before_a_weight_moves():
    worlds.run(2, fully_shard_jobs.misused)


def same(saved, loaded):
    """Asserts that what was loaded is what was saved, bit for bit."""
    assert saved.keys() == loaded.keys() and len(saved) > 20
    for key, value in saved.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(value, loaded[key]) if is_tensor else value == loaded[key], key


# Kept whole, by element, and in groups of 32 elements; a rate by the step count, which torch
# cannot set to 0.
RESUMED = {"flashadamw": {"lr": 0.01, "ema_decay": 0.9}, "adafactor": {"beta1": 0.9}}
RESUMED["muon"] = {"lr": 0.01, "ns_dtype": "fp32"}
KEPT = [("flashadamw", True), ("adafactor", False), ("muon", True)]


@pytest.mark.supports("`torch.distributed.checkpoint`", stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize("rule, fused", params(KEPT, KEPT[1:2]))
def test_a_run_goes_on_on_other_ranks_from_torchs_checkpoints(rule, fused, tmp_path):
    """2 -> 3 -> 1 ranks, against 2 that are not broken off."""
    hypers = RESUMED[rule]
    one, two = str(tmp_path / "whole"), str(tmp_path / "broken")
    run = functools.partial(worlds.run, 2, fully_shard_jobs.resume, rule, hypers, fused)
    expected = run(one, 0, 3)[0]
    assert expected["spread"]
    first = run(two, 0, 1)[0]
    second = worlds.run(3, fully_shard_jobs.resume, rule, hypers, fused, two, 1, 2)[0]
    got = worlds.run(1, fully_shard_jobs.resume, rule, hypers, fused, two, 2, 3)[0]
    for run_before, run_after in ((first, second), (second, got)):
        same(run_before["saved"], run_after["loaded"])
    # where sums are added up in another order, codes of 8 bits jump, and Muon amplifies the change
    close = {"flashadamw": 0.02, "muon": 1e-4}.get(rule, 1e-5)
    assert updates.error(got["after"], expected["after"], expected["before"]) <= close


@pytest.mark.parametrize("every", params([1, 20], [20]))
def test_a_function_of_a_state_dict_that_fails_on_one_rank_fails_on_all(every):
    worlds.run(2, fully_shard_jobs.failing, "flashadamw", every)
