"""Offload: the same weights as without, bit for bit; no operation mixes host and device; memory.

Ranks over gloo, on a pretended device (pretend.py); some on the CPU alone.
"""

import tempfile
from typing import Any

import pytest
import torch

from ds_ext import home, offload
from ds_ext.optimizer import OPTIMIZERS, Update
from ds_ext.shard import Shard
from tests import forks, offloading, pretend
from tests.offloading import Case

HOST, DEVICE = str(pretend.HOST), str(pretend.DEVICE)
WITH_STATE = ("adafactor beta1", "lamb", "galore", "galore right", "galore 8-bit")
CASES: list[Case] = [
    ("came", 3, "bf16", ("param", "state", "both")),
    *(("came", 3, how, ("both",)) for how in offloading.HOW if how not in ("fp32", "bf16")),
    *((name, 3, "bf16", ("param",)) for name in ("lomo", "adalomo", "adafactor")),
    *((name, 3, "bf16", ("both",)) for name in WITH_STATE),
    *(("came", stage, "bf16", ("state",)) for stage in (0, 1, 2)),
    ("lomo", 1, "bf16 master", ("state",)),
]
SAVED = [("came", "bf16 master"), ("galore", "fp32")]
FEW: list[Case] = [("came", 3, "clipped", ("both",)), ("galore", 3, "fp32", ("both",))]
WORLDS = {  # ranks, cases, what is saved, whether the device is pretended
    "2": (2, CASES, SAVED, True),
    "1": (1, FEW, [], True),
    "3": (3, FEW, [], True),
    "cpu": (2, FEW, [], False),
}
CHECKED = [(world, case) for world, (_, cases, *_) in WORLDS.items() for case in cases]


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[Any, Any]]]:
    """What each rank of each world found, made once."""
    made = {}
    for name, (world, cases, saved, pretended) in WORLDS.items():
        with tempfile.TemporaryDirectory() as folder:
            ended = forks.run(world, offloading.together, cases, folder, saved, pretended)
        assert all(rank.code == 0 for rank in ended), "\n".join(rank.output for rank in ended)
        made[name] = [rank.result for rank in ended]
    return made


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "world, optimizer, stage, how, kinds", [(world, *case) for world, case in CHECKED]
)
def test_offload_changes_no_bit(found, world, optimizer, stage, how, kinds):
    for rank in found[world]:
        runs = rank[optimizer, stage, how]
        for kind in kinds:
            assert same_bits(runs["none"]["weights"], runs[kind]["weights"]), kind
            assert runs["none"]["norms"] == runs[kind]["norms"]


@pytest.mark.parametrize("optimizer, stage, how, kinds", CASES)
def test_what_is_offloaded_lies_on_the_host_and_the_rest_on_the_device(
    found, optimizer, stage, how, kinds
):
    for rank in found["2"]:
        runs = rank[optimizer, stage, how]
        for kind in ("none", *kinds):
            where = runs[kind]["where"]
            weights_leave, states_leave = kind in ("param", "both"), kind in ("state", "both")
            # zero.Init knows which parameters stay gathered: their runs stay too
            stay = {DEVICE} if how == "zero init" else set()
            assert where["runs"] == ({HOST} | stay if weights_leave else {DEVICE})
            assert where["states"] <= {HOST if states_leave else DEVICE}
            assert where["states"] or optimizer == "lomo"


@pytest.mark.parametrize("optimizer, stage, how, kinds", CASES)
def test_memory_of_the_device(found, optimizer, stage, how, kinds):
    """What is alive between steps is what is kept there, and what travels comes a bucket a time."""
    for rank in found["2"]:
        runs = rank[optimizer, stage, how]
        for kind in kinds:
            ours, without = runs[kind], runs["none"]
            freed = without["kept"] - ours["kept"]
            assert freed > 0
            assert without["alive"] - ours["alive"] == freed
            assert ours["peak"] < without["peak"]
            copied = [ours["copied"][way] - without["copied"][way] for way in ("in", "out")]
            assert min(copied) > 0


def test_a_bf16_weight_travels_by_four_bytes_a_step(found):
    """Twice in, to be gathered and to be stepped, and once out."""


@pytest.mark.parametrize("optimizer, how", SAVED)
@pytest.mark.parametrize("way", ["to", "from", "with"])
def test_runs_are_gone_on_from_with_and_without_offload(found, optimizer, how, way):
    for rank in found["2"]:
        runs = rank[optimizer, how]
        assert same_bits(runs["none"], runs[way])
        place = DEVICE if way == "from" else HOST
        assert runs[f"where {way}"] == {"runs": {place}, "states": {place}}


def test_a_run_saved_between_micro_batches_is_gone_on_from(found):
    for rank in found["2"]:
        assert same_bits(rank["midway"]["none"], rank["midway"]["both"])
