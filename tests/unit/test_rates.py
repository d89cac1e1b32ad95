"""Learning rates to begin with: those that were measured, wherever they are shown."""

import pytest
import torch
from torch import nn

import ds_ext
from benchmarks.matrix.lines import best, loss_of
from ds_ext import rates
from ds_ext.commands import config
from ds_ext.rules import REGISTRY
from tests.rates import DATA, SAME, lines

NEAR = 1.15  # of the best loss, as docs/choosing.md says


def test_every_optimizer_has_a_rate():
    assert rates.RATES.keys() == REGISTRY.keys()


@pytest.mark.parametrize("name", [n for n, rate in rates.RATES.items() if rate.is_measured])
def test_a_measured_rate_gave_nearly_the_best_loss(name):
    runs, start = lines(), rates.RATES[name].start
    name = SAME.get(name, name)
    measured = [data for data in DATA if best(runs.of(data, name, 0))]
    assert measured
    for data in measured:
        own = runs.of(data, name, 0)
        there = [line for line in own if line["lr"] == start]
        if len({line["lr"] for line in own}) < 3 and not there:
            continue  # a data set that is only begun
        assert there, f"{name} was not run at {start} on {data}"
        assert loss_of(there[0]) <= NEAR * loss_of(best(own)), data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_with_a_rate_takes_the_steps_of_adalomo(dtype):
    runs = []
    for kind, own in ((ds_ext.AdaLomo, {}), (ds_ext.Adafactor, {"relative_step": False})):
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(n, generator=generator).to(dtype) for n in ((9, 7), (5,))]
        params = [nn.Parameter(p) for p in params]
        optimizer = kind(params, lr=3e-3, weight_decay=0.1, **own)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
        runs.append(params)
    assert all(map(torch.equal, *runs))
    assert rates.RATES["adafactor"] == rates.RATES["adalomo"]


@pytest.mark.parametrize(
    "rate, text", [(5e-4, "5e-4"), (2.5e-4, "2.5e-4"), (0.01, "1e-2"), (3.0, "3e0")]
)
def test_rates_are_written_as_in_papers(rate, text):
    assert rates.shown(rate) == text


def test_the_advice_is_a_rate_and_its_half_and_twice():
    found = rates.advice("AdaLomo").split()
    assert found[:2] == ["start", "at"]
    start, half, twice = (float(found[i].rstrip(",")) for i in (2, 4, 6))
    assert start == rates.RATES["adalomo"].start and (half, twice) == (start / 2, start * 2)
    assert rates.advice("SGD") == ""


@pytest.mark.parametrize("name", REGISTRY)
def test_a_config_with_numbers_has_the_rate(name):
    assert (
        config.make(name, 3, numbers=True)["optimizer"]["params"]["lr"] == rates.RATES[name].start
    )
    assert config.make(name, 3)["optimizer"]["params"]["lr"] == "auto"
