"""Moving averages of weights on real ranks: torch's, at each stage; exchange, resume, overflow."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests import worlds
from tests.common.choose import params
from tests.common.updates import error
from tests.distributed import ema_jobs

# How a model is trained, with an optimizer whose statistics are of whole matrices.
JOBS = {"stage 0": (ema_jobs.zero, 0, "AdamW"), "stage 1": (ema_jobs.zero, 1, "AdaLomo")}
JOBS |= {"stage 2": (ema_jobs.zero, 2, "AdamW"), "stage 3": (ema_jobs.zero, 3, "AdamW")}
JOBS |= {"stage 3, AdaLomo": (ema_jobs.zero, 3, "AdaLomo")}
JOBS |= {"stage 2, Muon": (ema_jobs.zero, 2, "Muon"), "stage 3, Muon": (ema_jobs.zero, 3, "Muon")}
JOBS |= {"copies": (ema_jobs.plain, False, "AdamW"), "FSDP2": (ema_jobs.plain, True, "AdamW")}
EMA = "moving averages of the weights (`ema_decay`)"
ALL = [(2, name) for name in JOBS] + [(3, name) for name in JOBS]
QUICK = [(2, name) for name in JOBS if JOBS[name][2] == "AdamW"] + [(3, "stage 3")]


def torchs(start, steps):
    """torch's averages of the weights that training had after each step."""
    model = nn.ParameterDict({n.replace(".", "/"): p.double() for n, p in start.items()})
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema_jobs.DECAY))
    for weights in steps:
        with torch.no_grad():
            for name, p in weights.items():
                model[name.replace(".", "/")].copy_(p)
        averaged.update_parameters(model)
    return {n.replace("/", "."): p.detach() for n, p in averaged.module.items()}


def loss_of(weights):
    model = ema_jobs.Net()
    model.load_state_dict({n: p.float() for n, p in weights.items()})
    return model(torch.randn(8, 6, generator=torch.Generator().manual_seed(9))).item()


def stage_of(name):
    job, given, _ = JOBS[name]
    return given if job is ema_jobs.zero else "fsdp2" if given else None


@pytest.mark.supports(EMA, stage=stage_of, optimizer=lambda name: JOBS[name][2])
@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_the_average_is_torchs_and_the_model_has_it_inside(ranks, name):
    job, *given = JOBS[name]
    for got in worlds.once(ranks, job, *given):
        wanted = torchs(got["start"], got["steps"])
        assert error(got["inside"], wanted, got["start"]) <= 1e-6
        assert got["restored"] and got["same"]
        losses = [loss_of(w) for w in (got["steps"][-1], wanted, got["steps"][-1])]
        assert got["losses"] == pytest.approx(losses, rel=1e-5)
        assert got["losses"][1] != pytest.approx(losses[0], rel=1e-3)
        for text in got.get("refused", ()):
            assert "inside ema()" in text


@pytest.mark.supports(EMA, stage="stage", optimizer="AdamW")
@pytest.mark.parametrize("stage", params([0, 1, 2, 3], [1, 3]))
def test_bf16_weights_are_exchanged_with_fp32_averages(stage):
    for got in worlds.once(2, ema_jobs.in_16_bits, stage):
        before, after = got["weights"]
        for n, average in got["averages"].items():
            assert average.dtype == torch.float32
            assert torch.equal(got["inside"][n], average.bfloat16())
            assert torch.equal(before[n], after[n]) and not torch.equal(before[n], got["inside"][n])
            assert torch.equal(got["after"][n], average)


DIVIDED = [(2, "experts"), (2, "pipeline"), (2, "tensor"), (4, "pipeline"), (4, "tensor")]


@pytest.mark.parametrize("ranks, kind", params(DIVIDED, DIVIDED[:3]))
def test_ranks_with_different_weights_average_their_own(ranks, kind):
    for got in worlds.once(ranks, ema_jobs.divided, kind):
        wanted = torchs(got["start"], got["steps"])
        assert error(got["inside"], wanted, got["start"]) <= 1e-6
        assert got["restored"]


def test_averages_of_experts_load_on_ranks_that_have_other_experts():
    found = worlds.once(2, ema_jobs.moved_experts)
    for saved, loaded in found:
        assert all(torch.equal(p, loaded[n]) for n, p in saved.items())
        assert loaded.keys() == found[0][0].keys() | found[1][0].keys() != saved.keys()
