"""Errors that all ranks raise alike are shown once; ops that DeepSpeed builds are announced."""

import os
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from ds_ext.distributed import consensus
from ds_ext.engine import layouts, rank_logging
from ds_ext.engine.monkeypatch import PATCHES


def test_a_traceback_comes_from_the_first_rank_alone(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[1]))
    own = sys.excepthook
    first, alike, other = ValueError("wrong"), ValueError("wrong"), ValueError("its own")
    rank_logging.shorten_traceback(first)  # on the first rank
    assert sys.excepthook is own
    monkeypatch.setattr(consensus, "is_first", lambda: False)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    for error in (alike, ValueError("another")):
        rank_logging.shorten_traceback(error)
    for error in (first, alike, other):
        sys.excepthook(type(error), error, None)
    assert shown == [first, other]
    told = capsys.readouterr().err
    assert told == "[ds_ext] rank 3: ValueError: wrong (traceback: rank 0)\n"


@pytest.fixture
def said(monkeypatch, tmp_path):
    """What is said of an op that is built in ``tmp_path``."""
    lines = []
    for level in ("log", "warn"):
        monkeypatch.setattr(rank_logging, level, lines.append)
    monkeypatch.setattr(cpp_extension, "_get_build_directory", lambda name, verbose: str(tmp_path))
    return lines


def test_what_takes_long_is_announced_once(said, tmp_path):
    (jit_load,) = (p.function for p in PATCHES if p.owner is OpBuilder)
    builder = type("Builder", (), {"name": "an_op"})()
    for _ in range(2):
        assert jit_load(lambda builder, verbose: "loaded", builder, False) == "loaded"
        (tmp_path / "an_op.so").touch()
    assert len(said) == 1 and "builds its op an_op" in said[0]


def test_a_lock_that_every_build_leaves_is_no_sign_of_one(said, tmp_path, monkeypatch):
    """As torch 2.15 does."""
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)
    for name in ("lock", "an_op.so"):
        (tmp_path / name).touch()
    rank_logging.announce_build("an_op")
    assert not said


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


@pytest.mark.skipif(not hasattr(cpp_extension, "FileBaton"), reason="torch 2.15 has no such lock")
def test_a_lock_that_a_killed_build_left_is_told_of(said, tmp_path):
    """Not one that a process holds, as torch's does, which has the file open."""
    baton = cpp_extension.FileBaton(str(tmp_path / "lock"))
    assert baton.try_acquire()
    rank_logging.announce_build("an_op")
    assert "builds its op" in said.pop()
    os.close(baton.fd)  # as when its process is killed
    rank_logging.announce_build("an_op")
    assert said.pop().endswith(f"delete {tmp_path / 'lock'}")
    (tmp_path / "lock").unlink()
    (tmp_path / "an_op.so").touch()
    rank_logging.announce_build("an_op")
    assert not said
