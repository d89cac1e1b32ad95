"""Freezing, groups, metrics and bf16 bits on real ranks."""

import pytest
import torch
import transformers

from tests.distributed import habits

pytestmark = pytest.mark.slow
FROZEN = [(stage, policy, 0.1) for stage in (0, 1, 3) for policy in ("fused", "sharded")]
FROZEN.append((2, "fused", 0.0))


@pytest.mark.supports("layers frozen and unfrozen on the way", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("stage, policy, max_norm", FROZEN)
def test_layers_may_be_frozen_unfrozen_and_added_between_steps(run, stage, policy, max_norm):
    world, results = run
    got = results[f"frozen {stage} {policy} {max_norm}"]
    assert "error" not in got, got["error"]
    model = habits.frozen_reference(world, max_norm, transformers.Adafactor)
    for n, p in model.named_parameters():
        update, error = (p - got["before"][n]).norm(), (got["after"][n] - p).norm()
        assert update > 0 and error <= max(1e-5 * update, habits.STEPS * 2**-24 * p.norm()), n


def test_a_parameter_from_outside_the_model_cannot_be_added(run):
    message = run[1]["stranger"]
    assert "add_param_group" in message and "not part of the model" in message


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("stage", range(4))
def test_metrics_tell_what_the_step_did(run, stage):
    world, results = run
    got = results[f"metrics {stage}"]
    assert "error" not in got, got["error"]
    for told, groups in zip(got["told"], got["expected"], strict=True):
        for i, (moved, weight) in enumerate(groups):
            assert told[f"update_rms/{i}"] == pytest.approx(moved, rel=1e-3)
            assert told[f"weight_rms/{i}"] == pytest.approx(weight, rel=1e-3)
        clipped = min(1.0, 0.2 / told["grad_norm"])
        assert told["clip_coefficient"] == pytest.approx(clipped, rel=1e-4)
        assert told["clipped_fraction"] == (told["grad_norm"] > 0.2)
        assert told["skipped_parameters"] == told["skipped_steps"] == 0
        assert (told["bytes_sent"] > 0) == (world > 1)
    assert any(told["clipped_fraction"] for told in got["told"])


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("stage", range(4))
def test_the_monitors_of_deepspeed_get_the_metrics(run, stage):
    got = run[1][f"metrics {stage}"]
    for name in ("grad_norm", "update_rms_0", "clip_coefficient", "skipped_parameters"):
        rows = got["events"][f"Train_Samples_{name}"]
        told = [told[name.replace("_0", "/0")] for told in got["told"]]
        assert [float(value) for _, value in rows] == pytest.approx(told)
        world = run[0]
        assert [int(samples) for samples, _ in rows] == [4 * world * n for n in (1, 2, 3)]


@pytest.mark.supports("bf16 weights", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize("weight_update", ["stochastic", "nearest", "master"])
@pytest.mark.parametrize("stage", range(4))
def test_bf16_weights_have_the_same_bits_on_any_number_of_ranks(run, stage, weight_update):
    got = run[1][f"bits {stage} {weight_update}"]
    assert "error" not in got, got.get("error")
    for n, p in habits.bits_reference(weight_update).items():
        assert p.dtype == torch.bfloat16 and torch.equal(got[n], p), n


@pytest.mark.supports("`deepspeed.checkpointing`", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize("policy, max_norm", [("fused", 0.0), ("sharded", 0.05)])
@pytest.mark.parametrize("stage", [1, 3])
def test_activation_checkpointing_of_deepspeed_is_exact(run, stage, policy, max_norm):
    world, results = run
    got = results[f"checkpointed {stage} {policy} {max_norm}"]
    assert "error" not in got, got["error"]
    assert got["message"] == ""
    for n, p in habits.checkpointed_reference(world, max_norm).named_parameters():
        update, error = (p - got["before"][n]).norm(), (got["after"][n] - p).norm()
        assert error <= max(1e-5 * update, habits.STEPS * 2**-24 * p.norm()), n


@pytest.mark.parametrize("stage", [1, 3])
def test_activation_checkpointing_of_deepspeed_cannot_be_measured_and_says_so(run, stage):
    got = run[1][f"checkpointed {stage} fused 0.05"]
    assert "deepspeed.checkpointing" in got["message"] and "sharded" in got["message"]
    assert all(torch.equal(p, got["before"][n]) for n, p in got["after"].items())


@pytest.mark.supports("save and resume, bit for bit", stage=3, optimizer="LAMB")
@pytest.mark.parametrize("kind", habits.RESUMED)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(run, kind):
    got = run[1][f"resumed {kind}"]
    assert "error" not in got, got["error"]
    assert got["equal"] and got["scales"][0] == got["scales"][1]
    for key in ("grad_norm", "clip_coefficient"):
        assert got["metrics"][0][key] == got["metrics"][1][key]
    if kind == "torch_autocast fp16":
        assert got["scales"][0] != 2**16  # it moved, so that its count had to be resumed
    if kind == "clipped by the step before":
        assert got["metrics"][0]["clip_coefficient"] < 1
