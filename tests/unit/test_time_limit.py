"""Time limits of groups, and what ranks ask that wait for others."""

import concurrent.futures
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from ds_ext import logs
from ds_ext.distributed import consensus, groups
from ds_ext.engine import layouts
from ds_ext.errors import LostRankError


def test_ranks_that_wait_ask_little(monkeypatch, caplog):
    """Seven of eight ranks wait: one of them reads all counts, and warns."""
    world, rank = 8, threading.local()
    store = mock.Mock(wraps=dist.HashStore())
    monkeypatch.setattr(dist, "get_rank", lambda: rank.number)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(consensus, "PATIENCE", 0.3)

    def wait(number):
        rank.number = number
        with consensus.announced("saving"):
            time.sleep(1.5)

    monkeypatch.setattr(logs.logger, "propagate", True)
    with concurrent.futures.ThreadPoolExecutor(world) as ranks:
        list(ranks.map(wait, range(world - 1)))
    assert store.add.call_count <= 4 * world
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has waited in saving" in line and "rank 7 has not called it" in line


def test_a_lost_connection_names_the_function_that_others_have_not_called(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(consensus, "PATIENCE", 0.1)
    with pytest.raises(LostRankError, match="waited in saving for 0.1 s: rank 1 has not called it"):
        with consensus.announced("saving"), groups.explained():
            raise RuntimeError("connection reset")


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
    monkeypatch.setattr(layouts, "made", list)
    engine = SimpleNamespace(sequence_parallel_size=1, device="cpu", module=None)
    engine.seq_data_parallel_group = "a group"
    layouts.share_time_limit(engine)
    assert told == [(limit, "a group")]
