"""Errors that all ranks raise alike are shown once; groups get a time limit."""

import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ds_ext.distributed import consensus
from ds_ext.engine import layouts, rank_logging


def test_a_traceback_comes_from_the_first_rank_alone(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[1]))
    own = sys.excepthook
    alike = {"__name__": "ds_ext.engine"}, {"__name__": "deepspeed.runtime.engine"}
    first = raised(alike[0])  # on the first rank
    monkeypatch.setattr(consensus, "is_first", lambda: False)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    other = raised({"__name__": "a_program"})
    assert sys.excepthook is own  # nothing has changed for errors of others
    for error in (first, other, *map(raised, alike)):
        sys.excepthook(type(error), error, error.__traceback__)
    assert shown == [first, other]
    line = "[ds_ext] rank 3: ValueError: wrong (traceback: rank 0)\n"
    assert capsys.readouterr().err == line * len(alike)


def raised(module):
    """An error that a module raises while ds_ext builds an engine."""
    with pytest.raises(ValueError) as caught, rank_logging.traceback_once():
        exec("def fail(): raise ValueError('wrong')\nfail()", module)
    return caught.value


def test_groups_get_their_time_limit_without_a_warning(monkeypatch):
    """By the function that torch 2.15 has, which warns of the older one."""
    told, limit = [], timedelta(seconds=7)
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=limit))
    everyone = SimpleNamespace(_get_backend=lambda device: backend)
    torch_215 = SimpleNamespace(
        group=SimpleNamespace(WORLD=everyone),
        set_timeout=lambda *given: told.append(given),
        distributed_c10d=SimpleNamespace(_set_pg_timeout=None),
    )
    monkeypatch.setattr(layouts, "dist", torch_215)
    layouts.share_time_limit(SimpleNamespace(groups={"a group"}, device="cpu"))
    assert told == [(limit, "a group")]
