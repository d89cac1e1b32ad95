"""Freezing, groups, metrics and bf16 bits on real ranks."""

import pytest
import torch
import transformers

from tests import worlds
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import habits

RANKS = (1, 2, 3)
FROZEN = [(stage, policy, 0.1) for stage in (0, 1, 3) for policy in ("fused", "sharded")]
FROZEN.append((2, "fused", 0.0))
FROZEN_ON = [(n, *case) for n in RANKS for case in FROZEN if n < 3 or case[0] in (0, 3)]


QUICK_FROZEN = [
    (2, 1, "fused", 0.1),
    (2, 2, "fused", 0.0),
    (2, 3, "sharded", 0.1),
    (3, 3, "fused", 0.1),
]
METRICS = [(n, s) for n in RANKS for s in range(4) if n < 3 or s in (1, 3)]
QUICK_METRICS = [(1, 0), (2, 2), (3, 3)]
BITS = [
    (n, stage, way)
    for n in RANKS
    for stage in range(4)
    for way in ("stochastic", "nearest", "master")
] + [(2, 1, "master24"), (3, 3, "master24")]
QUICK_BITS = [
    (2, 1, "nearest"),
    (2, 2, "stochastic"),
    (3, 1, "master"),
    (3, 3, "stochastic"),
    (3, 3, "master24"),
]
WAYS = [("fused", 0.0, "deepspeed"), ("sharded", 0.05, "deepspeed")]
WAYS += [("fused", 0.05, kind) for kind in ("deepspeed", "selective")]
CHECKPOINTED = [(n, stage, *way) for n in RANKS for stage in (1, 3) for way in WAYS]
QUICK_CHECKPOINTED = [
    (2, 1, "fused", 0.0, "deepspeed"),
    (2, 3, "fused", 0.05, "deepspeed"),
    (2, 3, "fused", 0.05, "selective"),
]
RESUMED = [(n, kind) for n in RANKS for kind in habits.RESUMED]
QUICK_RESUMED = [(2, kind) for kind in habits.RESUMED if kind != "bf16 master24"]


@pytest.mark.supports("layers frozen and unfrozen on the way", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage, policy, max_norm", params(FROZEN_ON, QUICK_FROZEN))
def test_layers_may_be_frozen_unfrozen_and_added_between_steps(ranks, stage, policy, max_norm):
    got = worlds.once(ranks, habits.frozen, stage, policy, max_norm)[0]
    model = habits.frozen_reference(ranks, max_norm, transformers.Adafactor)
    expected = dict(model.named_parameters())
    check_each(got["after"], expected, got["before"], habits.STEPS)
    assert not any(torch.equal(p, got["before"][n]) for n, p in expected.items())


EDITED = [
    (n, stage, policy) for n in RANKS for stage in range(4) for policy in ("fused", "sharded")
]
QUICK_EDITED = [(2, 0, "fused"), (2, 2, "sharded"), (2, 3, "fused")]


@pytest.mark.parametrize("ranks, stage, policy", params(EDITED, QUICK_EDITED))
def test_edits_of_groups_are_followed_as_in_one_process(ranks, stage, policy):
    got = worlds.once(ranks, habits.frozen, stage, policy, 0.0, "groups")[0]
    model = habits.frozen_reference(ranks, 0.0, transformers.Adafactor, "groups")
    check_each(got["after"], dict(model.named_parameters()), got["before"], habits.STEPS)


@pytest.mark.parametrize("ranks", params(RANKS, (2,)))
def test_a_parameter_from_outside_the_model_cannot_be_added(ranks):
    message = worlds.once(ranks, habits.stranger)[0]
    assert "add_param_group" in message and "not part of the model" in message


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage", params(METRICS, QUICK_METRICS))
def test_metrics_tell_what_the_step_did(ranks, stage):
    got = worlds.once(ranks, habits.metrics, stage)[0]
    for told, groups in zip(got["told"], got["expected"], strict=True):
        for i, (moved, weight) in enumerate(groups):
            assert told[f"update_rms/{i}"] == pytest.approx(moved, rel=1e-3)
            assert told[f"weight_rms/{i}"] == pytest.approx(weight, rel=1e-3)
        clipped = min(1.0, 0.2 / told["grad_norm"])
        assert told["clip_coefficient"] == pytest.approx(clipped, rel=1e-4)
        assert told["clipped_fraction"] == (told["grad_norm"] > 0.2)
        assert told["skipped_parameters"] == told["skipped_steps"] == 0
        assert (told["bytes_sent"] > 0) == (ranks > 1)
    assert any(told["clipped_fraction"] for told in got["told"])


@pytest.mark.supports("metrics and monitors", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage", params(METRICS, QUICK_METRICS))
def test_the_monitors_of_deepspeed_get_the_metrics(ranks, stage):
    got = worlds.once(ranks, habits.metrics, stage)[0]
    for name in ("grad_norm", "update_rms_0", "clip_coefficient", "skipped_parameters"):
        rows = got["events"][f"Train_Samples_{name}"]
        told = [told[name.replace("_0", "/0")] for told in got["told"]]
        assert [float(value) for _, value in rows] == pytest.approx(told)
        assert [int(samples) for samples, _ in rows] == [4 * ranks * n for n in (1, 2, 3)]


@pytest.mark.supports("bf16 weights", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize("ranks, stage, weight_update", params(BITS, QUICK_BITS))
def test_bf16_weights_have_the_same_bits_on_any_number_of_ranks(ranks, stage, weight_update):
    got = worlds.once(ranks, habits.bits, stage, weight_update)[0]
    for n, p in habits.bits_reference(weight_update).items():
        assert p.dtype == torch.bfloat16 and torch.equal(got[n], p), n


@pytest.mark.supports("`deepspeed.checkpointing`", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize(
    "ranks, stage, policy, max_norm, kind", params(CHECKPOINTED, QUICK_CHECKPOINTED)
)
def test_checkpointing_that_runs_backward_once_is_exact(ranks, stage, policy, max_norm, kind):
    got = worlds.once(ranks, habits.checkpointed, stage, policy, max_norm, kind)[0]
    model = habits.checkpointed_reference(ranks, max_norm)
    check_each(got["after"], dict(model.named_parameters()), got["before"], habits.STEPS)


@pytest.mark.supports("save and resume, bit for bit", stage=3, optimizer="LAMB")
@pytest.mark.parametrize("ranks, kind", params(RESUMED, QUICK_RESUMED))
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(ranks, kind):
    got = worlds.once(ranks, habits.resumed, kind)[0]
    assert got["equal"] and got["scales"][0] == got["scales"][1]
    for key in ("grad_norm", "clip_coefficient"):
        assert got["metrics"][0][key] == got["metrics"][1][key]
    if kind == "torch_autocast fp16":
        assert got["scales"][0] != 2**16  # it moved, so that its count had to be resumed
    if kind == "clipped by the step before":
        assert got["metrics"][0]["clip_coefficient"] < 1
