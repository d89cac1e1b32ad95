"""Runs that are gone on from: on the same ranks bit for bit, elsewhere as if nothing had been.

Real ranks, forked by resuming.py; what they saw is compared here.
"""

import pytest
import torch

from tests.common import apart
from tests.distributed.resuming import BITS, KINDS, STAGES, TRAINERS, error, same

EXACT = 1e-6  # of the update of the whole model
ALL = [(kind, stage) for kind in KINDS for stage in STAGES]


def optimizer(kind: str) -> str:
    """The optimizer of a kind of run, for the support matrix."""
    return KINDS[kind][0]


@pytest.fixture(scope="session")
def seen(tmp_path_factory):
    """What each phase's ranks returned."""
    out = tmp_path_factory.mktemp("resuming") / "results.pt"
    apart.python("-m", "tests.distributed.resuming", str(out), timeout=900)
    phases = torch.load(out, weights_only=False)
    for name, ranks in phases.items():
        for rank, ended in enumerate(ranks):
            assert ended.code == 0, f"{name}, rank {rank}: {ended.output[-3000:]}"
    return phases


@pytest.mark.supports("save and resume, bit for bit", stage="stage", optimizer=optimizer)
@pytest.mark.parametrize("kind, stage", ALL)
def test_gone_on_from_on_the_same_ranks_bit_for_bit(seen, kind, stage):
    for rank in seen["write"]:
        got = rank.result[kind, stage]
        assert got["same"]
        assert got["lr"][0] == got["lr"][1] and got["counts"] == (6, 6)
        assert got["client"] == {"told": stage}
        if kind == "galore 8-bit":  # a buffer that counts
            assert got["buffers"][0][0] == 6


@pytest.mark.supports("resume on other ranks and another stage", stage="stage", optimizer=optimizer)
@pytest.mark.parametrize("kind, stage", ALL)
def test_gone_on_from_on_another_number_of_ranks_and_stage(seen, kind, stage):
    whole = seen["write"][0].result[kind, stage]
    for phase in ("one", "two again"):  # 2 -> 3 -> 1 ranks, each at another stage; 2 -> 2
        got = seen[phase][0].result[kind, stage]
        assert error(got, whole["after"], whole["before"]) <= EXACT, phase
    three = seen["three"]
    assert all(same(three[0].result[kind, stage], r.result[kind, stage]) for r in three)


@pytest.mark.parametrize("way", BITS)
def test_weights_of_16_bits_and_their_masters_bit_for_bit(seen, way):
    for rank in seen["bits"]:
        cases = {k: v for k, v in rank.result.items() if k[0] == way}
        assert len(cases) == 6
        assert all(case["same"] and case["held"] for case in cases.values())
        if way == "master":  # what is held is more than bf16
            assert all(case["residual"] for case in cases.values())


@pytest.mark.supports("resume between micro-batches", stage="stage", optimizer="CAME")
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_wait_are_gone_on_from(seen, stage):
    for rank in seen[f"accumulated {stage}"]:
        assert rank.result["same"] and rank.result["kept"] > 10
        assert "1 of 3 micro-batches" in rank.result["message"]
    whole, one = (seen[f"accumulated{n} {stage}"][0].result for n in ("", " one"))
    assert error(one["after"], whole["after"], whole["before"]) <= EXACT
    assert whole["micro"] == one["micro"] == 3


@pytest.mark.supports(
    "HF Trainer's resume",
    stage=lambda name: TRAINERS[name],
    optimizer=lambda name: name.split()[-1],
)
@pytest.mark.parametrize("name", TRAINERS)
def test_hf_trainer_resumes_unchanged(seen, name):
    for rank in seen["trainer"]:
        got = rank.result
        assert same(got[name, "first"], got[name, "second"])
        assert got[name, "steps"] == list(range(1, 9))
    (one,) = seen["trainer one"]  # of twice the batch
    off = error(one.result[name, "second"], got[name, "first"], got[name, "before"])
    # Small steps: next to the weights' own resolution in fp32, 1e-6 of such an update.
    assert off <= 2 * EXACT


@pytest.mark.supports(
    lambda stage: "`zero_to_fp32.py`" if stage else [], stage="stage", optimizer="CAME"
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["fp32", "master"])
def test_tools_of_deepspeed_read_our_checkpoints(seen, way, stage):
    got = seen["tools"][0].result[way, stage]
    weights = got["weights"]
    assert all(got["plain"])  # torch.load(weights_only=True)
    assert same(got["16bit"], weights)
    assert same(got["module only"], weights)
    loaded, states, steps = got["no state"]
    assert same(loaded, weights) and (states, steps) == (0, 3)
    if stage:
        found = got["zero_to_fp32"]
        assert found.keys() == weights.keys()
        assert all(found[n].shape == w.shape for n, w in weights.items())
        assert same({n: t.to(weights[n].dtype) for n, t in found.items()}, weights)
        finer = any(not torch.equal(t, t.bfloat16().float()) for t in found.values())
        assert finer  # masters in fp32


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_of_a_model_trained_by_deepspeeds_adamw(seen, dtype, stage):
    trained = seen["adamw"][0].result[stage, dtype]
    (rank,) = seen["from adamw"]
    assert same(trained, rank.result[stage, dtype]["weights"])
    assert rank.result[stage, dtype]["states"] == 0
    path = rank.result[stage, dtype]["path"]
    assert f"{path}: weights are taken, the state of CAME starts anew" in rank.output
