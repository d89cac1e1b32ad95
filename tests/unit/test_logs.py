"""The log goes where the application says, or to stderr once training begins; never on import."""

import io
import logging

import pytest
import torch

import ds_ext
from ds_ext import logs


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
    model = torch.nn.Linear(3, 2)
    ds_ext.fuse_into_backward(
        model, ds_ext.LOMO(model.parameters(), lr=0.1), gradient_policy="sharded"
    )
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
