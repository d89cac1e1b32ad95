"""Streams of a GPU in backward, simulated: nothing runs too early, and memory is bounded. Process
groups: their time limits, and what ranks ask that wait for others."""

import concurrent.futures
import contextlib
import gc
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_ext
from ds_ext import logs
from ds_ext.backward.gradient_config import GradientConfig
from ds_ext.backward.streams import IN_FLIGHT, SideStreams
from ds_ext.distributed import consensus, groups
from ds_ext.distributed.layout import Agreement, Layout
from ds_ext.distributed.placement import Replicated
from ds_ext.engine import layouts
from ds_ext.engine.engine_settings import is_filled_in
from ds_ext.errors import LostRankError
from ds_ext.ops.executors.native import native_table
from tests.common.choose import params
from tests.common.simulated import fake_rank
from tests.common.streams import simulated

LAYERS, SIDE = 5, 32
MATRIX = 4 * SIDE * SIDE  # bytes


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    """Only torch's operations are noted."""
    monkeypatch.setattr(native_table, "is_available", lambda: False)


def agreed(layout, waiting, in_parts, *_):
    """What ranks that have the same gradients agree on."""
    return lambda: Agreement(waiting, in_parts, True)


@pytest.fixture(params=[1, 4], ids=["alone", "of four ranks"])
def world(request, monkeypatch):
    """This process, alone or as the first of ranks that do not exist: collectives do nothing."""
    monkeypatch.setattr(Layout, "agree", agreed)
    with contextlib.nullcontext() if request.param == 1 else fake_rank(0, request.param):
        yield request.param


def train(name, steps=2, before=lambda: None, **how):
    """Trains by a bucket for each matrix -> the simulated GPU; runs ``before`` on it first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    optimizer = getattr(ds_ext, name)(model.parameters(), lr=1e-3)
    with simulated() as gpu:
        before()
        fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=SIDE * SIDE, **how)
        for _ in range(steps):
            fused.backward(model(torch.randn(2, SIDE)).square().sum())
            optimizer.step()
        del fused, optimizer
        gc.collect()
    return gpu


HOW = [
    ("AdaLomo", {}),
    ("LOMO", {"max_grad_norm": 0.1}),
    ("AdamW", {"gradient_policy": "sharded"}),
    ("AdamW", {"clip_value": 0.1}),  # the ranks vote
    ("Muon", {}),  # the host reads votes
]


# Alone, and as the first of four ranks in all ways.
EACH = [(1, *HOW[0]), *((4, *how) for how in HOW)]


@pytest.mark.parametrize("world, name, how", params(EACH, EACH[:4]), indirect=["world"], ids=str)
def test_no_operation_runs_too_early_and_memory_of_gradients_is_bounded(
    world, name, how, monkeypatch
):
    gpu = train(name, **how)
    assert gpu.errors == []
    if "gradient_policy" not in how:  # which keeps them
        bound = (IN_FLIGHT + 1) * MATRIX  # and the bucket that fills
        small = 2 * MATRIX  # activations, and a gradient that is copied when it arrives
        assert gpu.peak < bound + small
        monkeypatch.setattr(SideStreams, "make_room", lambda self, buckets: None)
        assert train(name, **how).peak > bound + small


def step_alone():
    """A step of a small matrix on the stream of backward."""
    weight = nn.Parameter(torch.ones(12, 13))
    weight.grad = torch.ones(12, 13)
    ds_ext.AdaLomo([weight]).step()


def test_streams_do_not_share_memory_of_blocks():
    assert train("AdaLomo", before=step_alone).errors == []


@pytest.mark.parametrize("world", [4], indirect=True)  # one rank reduces nothing
def test_no_reduction_waits_for_the_steps_of_the_buckets_before(world):
    gpu = train("AdaLomo", steps=2)
    steps = [clock["side 2"] for clock in gpu.reductions[-LAYERS:]]  # of the last backward pass
    assert steps[: IN_FLIGHT + 1] == [steps[0]] * (IN_FLIGHT + 1)
    assert steps[-1] > steps[0]  # memory is bounded


def test_new_groups_split_no_communicator(monkeypatch):
    """Ranks outside a group do not make it, but all ranks would have to take part in a split."""
    split = []
    source = dist.distributed_c10d._get_split_source
    monkeypatch.setattr(
        dist.distributed_c10d, "_get_split_source", lambda pg: split.append(pg) or source(pg)
    )
    monkeypatch.setattr(groups, "_made", {})
    monkeypatch.setattr(groups, "_timeout", lambda group: timedelta(minutes=1))
    with fake_rank(0, 4):
        dist.group.WORLD.bound_device_id = torch.device("cpu", 0)
        made = groups.of_ranks((0, 1))
        assert dist.get_process_group_ranks(made) == [0, 1] and made.bound_device_id is None
        assert split == []
        assert dist.group.WORLD.bound_device_id == torch.device("cpu", 0)


def test_buckets_of_a_gpu_have_a_layer_but_a_small_part_of_free_memory(monkeypatch):
    model = nn.Linear(4, 4).bfloat16()
    layout = Layout(None, {p: n for n, p in model.named_parameters()}, lambda p: Replicated(None))
    layout.device = torch.device("cuda", 0)
    for free, expected in ((2**40, 2**28), (2**32, 2**26)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2**40))
        assert GradientConfig().bucket_size_for(layout) == expected
        assert GradientConfig(7).bucket_size_for(layout) == 7


def test_what_transformers_writes_for_auto_is_the_default_on_a_gpu():
    def engine(device, **config):
        return SimpleNamespace(
            device=torch.device(device), module=SimpleNamespace(config=SimpleNamespace(**config))
        )

    assert is_filled_in(engine("cuda", hidden_size=64), 64**2)
    assert not is_filled_in(engine("cuda", hidden_size=64), 64**2 + 1)
    assert not is_filled_in(engine("cuda", hidden_size=64), None)
    assert not is_filled_in(engine("cuda"), 64**2)
    assert not is_filled_in(engine("cpu", hidden_size=64), 64**2)


def pretend_ranks(monkeypatch, world, patience, rank):
    """This thread is a rank of a world that does not exist; returns its store, which is noted."""
    store = mock.Mock(wraps=dist.HashStore())
    monkeypatch.setattr(dist, "get_rank", rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(world)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(consensus, "PATIENCE", patience)
    return store


def test_ranks_that_wait_ask_little(monkeypatch, caplog):
    """Seven of eight ranks wait: one of them reads all counts, and warns."""
    world, rank = 8, threading.local()
    store = pretend_ranks(monkeypatch, world, 0.3, lambda: rank.number)

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
    pretend_ranks(monkeypatch, 2, 0.1, lambda: 0)
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
