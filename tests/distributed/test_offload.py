"""Offload: the same weights as without, bit for bit; no operation mixes host and device; memory.

Ranks over gloo, on a pretended device (pretend.py); some on the CPU alone.
"""

import gc
import math
from typing import Any

import pytest
import torch

from ds_ext.config import config_checks
from ds_ext.optimizer import OPTIMIZERS, host_offload
from ds_ext.optimizer.host_offload import HostOffload
from ds_ext.planner import memory
from tests import worlds
from tests.common import pretend
from tests.common.choose import params
from tests.common.states import same
from tests.distributed import offload_jobs
from tests.distributed.offload_jobs import Case

HOST, DEVICE = str(pretend.HOST), str(pretend.DEVICE)
WITH_STATE = ("adafactor beta1", "lamb", "flash 8-bit", "galore left", "galore", "galore 8-bit")
CASES: list[Case] = [
    ("came", 3, "bf16", ("param", "state")),
    *(("came", 3, how, ("both",)) for how in offload_jobs.HOW if how != "fp32"),
    ("lomo", 3, "bf16", ("param", "param, not pinned")),
    ("adalomo", 3, "bf16", ("param", "state")),
    ("adafactor", 3, "bf16", ("param",)),
    *((name, 3, "bf16", ("both",)) for name in WITH_STATE),
    *(("came", stage, "bf16", ("state",)) for stage in (0, 1, 2)),
    ("lomo", 1, "bf16 master", ("state",)),
    *(("muon", stage, "fp32", ("state",)) for stage in (0, 1, 2)),
    *(("muon", 3, how, ("both",)) for how in ("fp32", "clipped", "accumulated", "zero init")),
    *((name, 3, "fp32", ("both",)) for name in ("apollo", "apollomini")),
]
SAVED = [("came", "bf16 master"), ("came", "accumulated"), ("galore left", "fp32")]
WEIGHTS, STATES = "weights offloaded to the host", "states offloaded to the host"
NAMES = {name: made for name, (made, _) in offload_jobs.HYPERS.items()}
FEW: list[Case] = [
    ("lomo", 3, "bf16", ("param",)),
    ("came", 3, "clipped", ("both",)),
    ("galore left", 3, "fp32", ("both",)),
]
WORLDS = {  # ranks, cases, whether the device is pretended
    "2": (2, CASES, True),
    "1": (1, FEW, True),
    "3": (3, FEW, True),
    "cpu": (2, FEW, False),
}
CHECKED = [(world, *case) for world, (_, cases, _) in WORLDS.items() for case in cases]
QUICK: list[Case] = [("came", 3, "bf16", ("both",))]


def is_quick(checked: tuple[Any, ...]) -> bool:
    world, *case = checked
    return (*case,) in {"2": QUICK, "1": FEW[:1], "3": [], "cpu": FEW[1:2]}[world]


def found(world: str, *case: Any) -> list[dict[str, Any]]:
    ranks, _, pretended = WORLDS[world]
    return worlds.once(ranks, offload_jobs.compared, case, pretended)


def _features(kinds):
    shown = {"param": [WEIGHTS], "state": [STATES], "both": [WEIGHTS, STATES]}
    return [f for kind in kinds for f in shown.get(kind, [])]


@pytest.mark.supports(_features, stage="stage", optimizer=lambda optimizer: NAMES[optimizer])
@pytest.mark.parametrize("world, optimizer, stage, how, kinds", params(CHECKED, is_quick))
def test_offload_changes_no_bit(world, optimizer, stage, how, kinds):
    for runs in found(world, optimizer, stage, how, kinds):
        for kind in kinds:
            assert same(runs["none"]["weights"], runs[kind]["weights"]), kind
            assert runs["none"]["norms"] == runs[kind]["norms"]
            if how == "averaged":
                assert same(runs["none"]["averages"], runs[kind]["averages"])
                assert same(runs[kind]["weights"], runs[kind]["restored"])
                assert not same(runs[kind]["weights"], runs[kind]["averages"])


@pytest.mark.parametrize("optimizer, stage, how, kinds", params(CASES, QUICK))
def test_where_tensors_lie_and_what_travels(optimizer, stage, how, kinds):
    for runs in found("2", optimizer, stage, how, kinds):
        for kind, run in runs.items():
            where = run["where"]
            weights_leave, states_leave = kind[:5] in ("param", "both"), kind in ("state", "both")
            assert where["runs"] == {HOST if weights_leave else DEVICE}
            assert where["states"] <= {HOST if states_leave else DEVICE}
            assert where["states"] or optimizer == "lomo"
            # Between steps nothing else is alive on the device.
            assert 0 <= run["alive"] - run["kept"] <= offload_jobs.SLACK
            assert run["pinned"] == (0 if "not" in kind else run["partitions"])
        for kind in kinds:
            assert runs[kind]["kept"] < runs["none"]["kept"]
            check_traffic(runs[kind], runs["none"]["copied"], optimizer, how)


def check_traffic(run, without, optimizer, how):
    """Out: what was stepped, once a step. In: that as well, but for a state's first step."""
    more = {way: run["copied"][way] - without[way] for way in ("in", "out")}
    left = offload_jobs.STEPS * (run["stepped"] + run["states"])
    scalars = offload_jobs.SLACK * offload_jobs.STEPS if "apollo" in optimizer else 0
    assert left - scalars <= more["out"] <= left + scalars and left > 0
    stepped = offload_jobs.STEPS * run["stepped"] + (offload_jobs.STEPS - 1) * run["states"]
    gathered = more["in"] - stepped  # by DeepSpeed
    assert gathered > 0 if run["stepped"] else gathered == 0


@pytest.mark.parametrize("optimizer, stage, how, kinds", params(FEW, FEW[:1]))
def test_the_most_that_is_on_the_device_is_less(optimizer, stage, how, kinds):
    """On one rank, where no thread of gloo's holds on to what it sent."""
    runs = found("1", optimizer, stage, how, kinds)[0]
    assert runs[kinds[0]]["peak"] < runs["none"]["peak"]


def test_states_are_pinned_unless_they_are_not_to_be(monkeypatch):
    section = {"device": "cpu"}
    assert HostOffload.from_config(section) == HostOffload(pin_memory=False)  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert HostOffload.from_config(section) == HostOffload(pin_memory=True)
    assert HostOffload.from_config(section | {"pin_memory": False}) == HostOffload(pin_memory=False)
    assert HostOffload.from_config({"device": "none"}) is HostOffload.from_config({}) is None
    empty, asked = torch.empty, []
    monkeypatch.setattr(
        torch, "empty", lambda *a, pin_memory, **k: asked.append(pin_memory) or empty(*a, **k)
    )
    x = torch.randn(host_offload.SMALL)
    for pins in (True, False):
        assert torch.equal(HostOffload(pins).to_host(x), x)
    assert asked == [True, False]


def test_a_small_state_stays_on_the_device():
    with pretend.device():
        for size, where in ((host_offload.SMALL // 4 - 1, DEVICE), (host_offload.SMALL // 4, HOST)):
            x = torch.zeros(size, device=pretend.DEVICE)
            state = {"inner": {"x": x}, "master": x}
            HostOffload(pin_memory=False).store_state(state, {"inner": {"x": x + 1}, "step": 3})
            assert state.keys() == {"inner", "step"}
            assert state["inner"]["x"].sum() == size
            assert str(host_offload.store(x, pretend.DEVICE, HostOffload(False)).device) == where
            held = HostOffload(False).to_host(x)
            assert str(held.device) == where
            assert HostOffload(False).to_host(x + 1, held) is held or where == DEVICE
            assert HostOffload(False).to_host(held, held) is held


def test_a_pretended_device_keeps_to_itself():
    with pretend.device() as device:
        there = torch.ones(3, device=pretend.DEVICE)
        here = torch.ones(3)
        for op in (torch.add, torch.dot, torch.Tensor.add_, lambda *xs: torch.cat(xs)):
            for pair in ((here, there), (there, here)):
                with pytest.raises(pretend.Mixed):
                    op(*pair)
        assert (str((there + 1).device), str(here.device)) == (DEVICE, HOST)
        assert str((there.cpu() + here).device) == HOST
        assert str((there + here.to(there)).device) == DEVICE
        alive = device.alive()
        del there
        del pair
        gc.collect()
        assert alive - device.alive() == 12


def test_the_planner_counts_what_stays(monkeypatch):
    """Beside the share of a bucket, the largest parameter here, of what is offloaded."""
    shapes = {n: tuple(p.shape) for n, p in offload_jobs.Tower().named_parameters()}
    rule = OPTIMIZERS["came"].hypers()
    plain, one, both = (
        memory.optimizer_memory(
            rule, shapes, 3, 2, torch.bfloat16, 1, offloads=offloads, persist=45
        )
        for offloads in ((), ("param",), ("param", "optimizer"))
    )
    runs = 2 * sum(-(-math.prod(shape) // 2) for shape in shapes.values())
    share = 41 * 41 / memory.elements(shapes)
    measured = max(runs["both"]["kept"] for runs in found("2", *QUICK[0]))
    assert one.weights == both.weights == pytest.approx(measured + share * runs, abs=2)
    assert plain.weights == measured + runs
    assert (one.state, one.gradients) == (plain.state, plain.gradients)
    assert both.state == plain.state  # all of it is small
    monkeypatch.setattr(host_offload, "SMALL", 200)
    rows_and_columns = {"first": (41, 12), "last": (7, 41), "square": (41, 41)}
    held = memory.optimizer_memory(
        rule, rows_and_columns, 3, 2, torch.bfloat16, 1, offloads=("optimizer",)
    )
    whole = memory.optimizer_memory(rule, rows_and_columns, 3, 2, torch.bfloat16, 1)
    share = 41 * 41 / memory.elements(rows_and_columns)
    assert held.weights == whole.weights
    small = 4 * 2 * (41 + 12 + 7 + 41 + 41 + 41)  # 164 bytes at most
    assert held.state == pytest.approx(small + share * (whole.state - small))


def config(name: str, stage: int = 3, **section: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, name: {"device": "cpu", **section}}}


# What is accepted, and words of what is told of it: it has no effect.
ACCEPTED = [
    (config("offload_param", pin_memory=False), []),
    (config("offload_optimizer", stage=0, pin_memory=True), []),
    (config("offload_param", stage=1, device="none"), []),
    ({"zero_optimization": {"offload_param": None}}, []),
    (config("offload_param", max_in_cpu=10, nvme_path="/x"), ["max_in_cpu", "nvme_path"]),
    (config("offload_optimizer", pipeline_read=False), ["offload_optimizer.pipeline_read"]),
    (config("offload_optimizer", stage=0, buffer_count=4), ["offload_optimizer.buffer_count"]),
]


@pytest.mark.parametrize("given, words", ACCEPTED)
def test_what_has_no_effect_is_accepted_and_told_of(given, words):
    assert not list(config_checks.problems(given))
    optimizer = OPTIMIZERS["lamb"]([torch.nn.Parameter(torch.ones(8, 8))])
    lines = list(config_checks.ignored(given, optimizer))
    assert bool(lines) == bool(words) and all("no effect" in line for line in lines)
    assert all(any(word in line for line in lines) for word in words)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_offload_of_almost_nothing_is_told_of(name):
    def told(**hypers: Any) -> bool:
        optimizer = OPTIMIZERS[name]([torch.nn.Parameter(torch.ones(8, 8))], **hypers)
        return bool(list(config_checks.ignored(config("offload_optimizer"), optimizer)))

    nvme = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    lomo = OPTIMIZERS["lomo"]([torch.nn.Parameter(torch.ones(8, 8))])
    assert not list(config_checks.ignored(nvme, lomo))  # it is refused
    assert told() == (name in ("lomo", "adalomo", "adafactor", "scale", "sinkgd"))
    assert not told(weight_update="master")
    if name == "adafactor":
        assert not told(beta1=0.9)


@pytest.mark.parametrize("optimizer, how", params(SAVED, SAVED[1:2]))
@pytest.mark.parametrize("way", params(["to", "from", "param"], ["to"]))
def test_runs_are_gone_on_from_with_and_without_offload(optimizer, how, way):
    for runs in worlds.run(2, offload_jobs.resumed, optimizer, how, way):
        assert same(runs["unbroken"], runs["resumed"])
        places = {"to": (HOST, HOST), "from": (DEVICE, DEVICE), "param": (HOST, DEVICE)}[way]
        assert runs["where"] == {"runs": {places[0]}, "states": {places[1]}}


LENT = [(stage, how) for stage in (0, 2, 3) for how in ("bf16 master", "accumulated")]


@pytest.mark.parametrize("stage, how", params(LENT, [(0, "accumulated")]))
def test_states_are_lent_to_the_host_and_come_back(stage, how):
    for got in worlds.run(2, offload_jobs.lent, stage, how):
        for name, p in got["weights False"].items():
            assert torch.equal(got["weights True"][name], p), name
        assert got["before"] == got["after"] == {"runs": {DEVICE}, "states": {DEVICE}}
        has_masters = "master" in how  # which are hp_params
        assert got["part"]["states"] == ({HOST, DEVICE} if has_masters else {HOST})
        assert got["part"]["runs"] == {DEVICE}
        assert got["lent"]["runs"] == got["lent"]["states"] == {HOST}
        assert got["lent"]["gradients"] == ({HOST} if how == "accumulated" else set())
        assert got["kept"] == 0
        assert all("call engine.reload_states() first" in told for told in got["messages"])
