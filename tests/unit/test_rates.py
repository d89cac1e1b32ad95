"""Learning rates to begin with: those that were measured, wherever they are shown."""

import pytest
import torch
from torch import nn

import ds_ext
from benchmarks.matrix import summary
from benchmarks.matrix.lines import Lines
from ds_ext import rates
from ds_ext.commands import config
from ds_ext.rules import REGISTRY
from tests.rates import DATA, SAME, lines

MOST = 0.07  # of the gain, as docs/choosing.md says


def test_every_optimizer_has_a_rate():
    assert rates.RATES.keys() == REGISTRY.keys()


@pytest.mark.parametrize("name", rates.RATES)
def test_a_measured_rate_gives_up_least(name):
    shares = summary.given_up(lines(), DATA, SAME.get(name, name))
    assert min(shares, key=shares.__getitem__) == rates.RATES[name].start
    assert shares[rates.RATES[name].start] < (0.25 if name == "lomo" else MOST)


def test_what_is_given_up_is_a_share_of_the_gain(tmp_path):
    runs = Lines(tmp_path, {})
    for data, lr, loss in [("a", 1.0, 2.0), ("a", 0.1, 3.0), ("b", 1.0, 1.0), ("b", 0.1, 0.5)]:
        line = {"data": data, "candidate": "x", "lr": lr, "seed": 0, "loss": loss, "before": 4.5}
        runs.add(line)
    runs.add(line | {"lr": 0.01, "loss": 0.75})  # on one data set alone
    assert summary.given_up(runs, ["a", "b", "c"], "x") == {0.1: 0.4, 1.0: 0.125}


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
    assert rates.RATES["adafactor"].start == rates.RATES["adalomo"].start


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
    rate = rates.RATES[name]
    for numbers, lr in ((True, rate.start), (False, "auto")):
        params = config.make(name, 3, numbers)["optimizer"]["params"]
        assert params.items() >= {"lr": lr, **rate.params}.items()


def test_the_advice_names_what_a_rate_goes_with():
    assert '"adjust_lr_fn": "match_rms_adamw"' in rates.advice("Muon")
    assert '"relative_step": false' in rates.advice("Adafactor")
    assert " with " not in rates.advice("AdaLomo")
