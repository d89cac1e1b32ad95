"""Layers that are frozen, unfrozen or added between steps, or run again in backward."""

import pytest
import torch
import transformers

from tests import worlds
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import freezing_jobs

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
WAYS = [("fused", 0.0, "deepspeed"), ("sharded", 0.05, "deepspeed")]
WAYS += [("fused", 0.05, kind) for kind in ("deepspeed", "selective")]
CHECKPOINTED = [(n, stage, *way) for n in RANKS for stage in (1, 3) for way in WAYS]
QUICK_CHECKPOINTED = [
    (2, 1, "fused", 0.0, "deepspeed"),
    (2, 3, "fused", 0.05, "deepspeed"),
    (2, 3, "fused", 0.05, "selective"),
]


@pytest.mark.supports("layers frozen and unfrozen on the way", stage="stage", optimizer="AdaLomo")
@pytest.mark.parametrize("ranks, stage, policy, max_norm", params(FROZEN_ON, QUICK_FROZEN))
def test_layers_may_be_frozen_unfrozen_and_added_between_steps(ranks, stage, policy, max_norm):
    got = worlds.once(ranks, freezing_jobs.frozen, stage, policy, max_norm)[0]
    model = freezing_jobs.frozen_reference(ranks, max_norm, transformers.Adafactor)
    expected = dict(model.named_parameters())
    check_each(got["after"], expected, got["before"], freezing_jobs.STEPS)
    assert not any(torch.equal(p, got["before"][n]) for n, p in expected.items())


@pytest.mark.parametrize("ranks", params(RANKS, (2,)))
def test_a_parameter_from_outside_the_model_cannot_be_added(ranks):
    message = worlds.once(ranks, freezing_jobs.stranger)[0]
    assert "add_param_group" in message and "not part of the model" in message


@pytest.mark.supports("`deepspeed.checkpointing`", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize(
    "ranks, stage, policy, max_norm, kind", params(CHECKPOINTED, QUICK_CHECKPOINTED)
)
def test_checkpointing_that_runs_backward_once_is_exact(ranks, stage, policy, max_norm, kind):
    got = worlds.once(ranks, freezing_jobs.checkpointed, stage, policy, max_norm, kind)[0]
    model = freezing_jobs.checkpointed_reference(ranks, max_norm)
    check_each(got["after"], dict(model.named_parameters()), got["before"], freezing_jobs.STEPS)
