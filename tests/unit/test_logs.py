"""Where the log goes, never on import, and what its first lines tell when training begins."""

import io
import logging

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext import logs, rates
from ds_ext.backward import startup_log
from ds_ext.ops.state import nbytes
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from tests.common.hypers import NEEDED
from tests.common.plain import fuse
from tests.common.ranks import logged


@pytest.fixture
def fresh(monkeypatch):
    """Logging as a new process has it: nothing is configured. The root logger."""
    root = logging.RootLogger(logging.WARNING)  # not the one that pytest has
    monkeypatch.setattr(logs.logger, "parent", root)
    monkeypatch.setattr(logs.logger, "handlers", [logging.NullHandler()])
    logs.logger.setLevel(logging.NOTSET)
    yield root
    logs.logger.setLevel(logging.NOTSET)


def train() -> None:
    """Training that says what it keeps."""
    fuse(model := nn.Linear(3, 2), gradient_policy="sharded")
    model(torch.randn(4, 3)).sum().backward()


LINE = "gradients are kept until the step"


def test_importing_it_configures_nothing():
    assert not any(type(h) is logging.StreamHandler for h in logs.logger.handlers)
    assert isinstance(logs.logger.handlers[0], logging.NullHandler)


def test_lines_reach_stderr_where_nothing_is_configured(fresh, capsys):
    train()
    train()
    said = capsys.readouterr().err
    assert said.count(LINE) == 2 and all(x.startswith("[ds_ext] ") for x in said.splitlines())


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("at_root", [True, False], ids=["root", "own"])
def test_lines_go_where_the_application_says_and_nowhere_else(fresh, capsys, first, at_root):
    if not first:
        train()
        capsys.readouterr()
    own = io.StringIO()
    (fresh if at_root else logs.logger).addHandler(logging.StreamHandler(own))
    logging.getLogger("ds_ext").setLevel(logging.INFO)
    train()
    assert own.getvalue().count(LINE) == 1 and LINE not in capsys.readouterr().err


class OthersOnly(logging.Filter):
    """As axolotl has it: lines of others are kept back below warnings."""

    def filter(self, record):
        return record.levelno >= logging.WARNING


WAYS = ["level", "handler's level", "handler's filter", "logger's filter", "after a first run"]


@pytest.mark.parametrize("way", WAYS)
def test_the_first_line_is_seen_where_the_application_shows_warnings_alone(fresh, capsys, way):
    if way == "after a first run":
        train()
        capsys.readouterr()
    own = io.StringIO()
    handler = logging.StreamHandler(own)
    fresh.addHandler(handler)
    if way != "level":
        fresh.setLevel(logging.INFO)
    if way == "handler's level":
        handler.setLevel(logging.WARNING)
    if way in ("handler's filter", "after a first run"):
        handler.addFilter(OthersOnly())
    if way == "logger's filter":
        logs.logger.addFilter(OthersOnly())
    try:
        train()
    finally:
        logs.logger.filters.clear()
    said = capsys.readouterr().err
    assert said.startswith("[ds_ext] LOMO, without DeepSpeed, 1 rank: ") and said.count("\n") == 1
    assert LINE not in own.getvalue()


def test_the_first_line_is_shown_once_where_the_application_takes_it(fresh, capsys):
    own = io.StringIO()
    fresh.addHandler(logging.StreamHandler(own))
    fresh.setLevel(logging.INFO)
    train()
    assert own.getvalue().count("LOMO, without DeepSpeed") == 1 and not capsys.readouterr().err


def test_a_level_that_was_set_stays(fresh, capsys):
    logging.getLogger("ds_ext").setLevel(logging.WARNING)
    train()
    assert not capsys.readouterr().err
    logs.logger.warning("heard")
    assert capsys.readouterr().err == "[ds_ext] heard\n"


RULES = [*((name, {}) for name in REGISTRY), ("adafactor", {"scale_parameter": False})]


def moved(name, hypers, size):
    """How far a matrix of RMS 1 times ``size`` is moved by its first step."""
    generator = torch.Generator().manual_seed(2)
    p = nn.Parameter(size * torch.randn(6, 8, generator=generator, dtype=torch.float64))
    before = p.detach().clone()
    optimizer = OPTIMIZERS[name]([p], weight_decay=0.0, **(NEEDED[name] | hypers))
    p.grad = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    optimizer.step()
    return (p.detach() - before).norm(), optimizer.is_relative(p)


@pytest.mark.parametrize("name, hypers", RULES)
def test_a_rule_is_registered_as_relative_if_its_steps_are(name, hypers):
    (one, is_relative), (eight, _) = (moved(name, hypers, size) for size in (1, 8))
    assert eight / one == pytest.approx(8 if is_relative else 1, rel=1e-6)


class Adapted(nn.Module):
    """A layer with a bias and an adapter, whose second matrix starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.lora_A = nn.Parameter(torch.randn(2, 5))
        self.lora_B = nn.Parameter(torch.zeros(4, 2))
        self.norm = nn.LayerNorm(4)  # its bias is zero, which is normal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x) + x @ self.lora_A.T @ self.lora_B.T)


def said(optimizer, model):
    with logged() as lines:
        ds_ext.fuse_into_backward(model, optimizer)
    return lines


@pytest.mark.parametrize("name", ["adalomo", "lamb", "adafactor"])
def test_matrices_that_start_at_zero_are_told_of_with_what_to_do(name):
    model = Adapted()
    told = said(OPTIMIZERS[name](model.parameters()), model)
    (line,) = [line for line in told if "start at zero" in line]
    assert "hardly move: lora_B. Use" in line
    assert 'param_groups=[{"match": "lora_", "type": "AdamW", "lr": 1e-3}]' in line
    model.lora_B.data[3, 1] = 1e-9
    assert not [x for x in said(OPTIMIZERS[name](model.parameters()), model) if "zero" in x]


ADVICE = {"param_groups": [{"match": "lora_", "type": "AdamW", "lr": 1e-4}]}
SILENT = [(name, {"lr": 5e-5}) for name in ("lomo", "adamw", "came", "sinkgd")]  # not relative


@pytest.mark.parametrize("name, how", [*SILENT, ("adalomo", ADVICE)])
def test_other_rules_do_not_mind_zeros_and_advice_that_is_taken_ends(name, how):
    model = Adapted()
    told = said(OPTIMIZERS[name].for_model(model, **how), model)
    assert not [line for line in told if "zero" in line or "small" in line]
    assert how is not ADVICE or told[-1].startswith("AdaLomo and AdamW, ")


@pytest.mark.parametrize(
    "lr, is_told", [(5e-5, True), (1e-6, True), (0.0, False), (1e-4, False), (1e-3, False)]
)
def test_a_rate_that_suits_adamw_is_told_of(lr, is_told):
    model = nn.Linear(4, 4)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=lr)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # begins at 0
    told = [line for line in said(optimizer, model) if "is small for AdaLomo" in line]
    assert len(told) == is_told
    assert all(f"lr = {lr:g} " in line and rates.advice("AdaLomo") in line for line in told)


@pytest.mark.parametrize("name, lr", [("adalomo", 0.2), ("came", 0.01), ("lomo", 4.0)])
def test_a_rate_far_above_those_that_are_known_is_told_of(name, lr):
    model = nn.Linear(4, 4)
    for given, is_told in ((lr, True), (lr / 10, False)):
        told = said(OPTIMIZERS[name].for_model(model, lr=given), model)
        assert any(f"lr = {given:g} is large for" in line for line in told) == is_told


@pytest.mark.parametrize("name", ["scale", "sinkgd", "galoreadamw"])
def test_a_rule_for_linear_layers_that_got_no_model_is_told_of(name):
    rule, model = OPTIMIZERS[name], nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    for optimizer, is_told in ((rule(model.parameters()), True), (rule.for_model(model), False)):
        words = f"{rule.__name__} steps all its parameters alike"
        assert any(line.startswith(words) for line in said(optimizer, model)) == is_told


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("weight_update", ["stochastic", "master", "master24"])
def test_the_bytes_of_state_are_those_that_are_held(name, weight_update):
    model = Adapted().bfloat16()
    hypers = NEEDED[name] | {"weight_update": weight_update}
    optimizer = OPTIMIZERS[name].for_model(model, **hypers)
    fused = ds_ext.fuse_into_backward(model, optimizer)
    expected = startup_log.state_bytes(optimizer, fused.layout)
    model(torch.randn(3, 5).bfloat16()).sum().backward()
    optimizer.step()
    assert sum(nbytes(state) for state in optimizer.state.values()) == expected


def test_the_first_line_tells_how_a_model_is_stepped():
    model = Adapted().bfloat16()
    told = said(ds_ext.LAMB(model.parameters(), weight_update="master"), model)[0]
    start = "LAMB, without DeepSpeed, 1 rank: 50 parameters trained, gradient_policy"
    assert told.startswith(f'{start} "fused", weights bfloat16 ("master"), ')
    assert told.endswith(" MiB of state on this rank")
    ds_ext.store_int8(large := nn.Linear(256, 256, bias=False).bfloat16())
    assert ', weights int8 ("stochastic"), ' in said(ds_ext.AdaLomo(large.parameters()), large)[0]
