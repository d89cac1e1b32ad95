"""Engines whose weights are stored in 8 bits: the same codes on all ranks and at all stages."""

import pytest
import torch

import ds_ext
from ds_ext.ops import int8
from ds_ext.planner import memory
from tests import worlds
from tests.common.choose import params
from tests.common.int8_model import STORED, made
from tests.common.states import same
from tests.distributed import int8_engines_jobs as jobs


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("int8")
    return lambda *names: str(base / " ".join(map(str, names)))


@pytest.mark.supports("weights stored in int8", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize(
    "world, stage", params([(w, s) for w in (2, 1) for s in (0, 1, 2, 3)], [(2, 2), (2, 3)])
)
def test_ranks_store_the_same_codes_and_go_on_from_a_checkpoint(folder, world, stage):
    got = worlds.once(world, jobs.run, stage, folder(world, stage))
    for rank in got[1:]:
        assert all(same(x, y) for x, y in zip(got[0], rank, strict=True) if isinstance(x, dict))
    begin, halfway, loaded, after, again, saved, (half, edited), most = got[0]
    codes = [f"{name} torch.int8" for name in STORED]
    assert not any(torch.equal(halfway[name], begin[name]) for name in codes)
    assert same(loaded, halfway) and same(again, after) and not same(after, halfway)
    assert all(x.dtype == torch.bfloat16 for x in saved.values())
    assert torch.equal(half, edited.float())
    of_stage_0 = worlds.once(world, jobs.run, 0, folder(world, 0))[0]
    assert same(after, of_stage_0[3])
    largest = max(x.numel() for name, x in saved.items() if name in STORED)
    assert most == (largest // world if stage == 3 else largest)


@pytest.mark.parametrize(
    "world, stage", params([(w, s) for w in (1, 2, 4) for s in (0, 3)], [(1, 3), (4, 3)])
)
def test_any_ranks_load_the_same_codes(folder, world, stage):
    saved = worlds.once(2, jobs.run, 3, folder(2, 3))[0][1]
    for got in worlds.run(world, jobs.loaded, stage, folder(2, 3)):
        assert same(got, saved)


def test_runs_that_cut_groups_are_not_stored():
    for told in worlds.run(3, jobs.refusal, 3):
        assert "has a multiple of 256 elements on each rank" in told


WAYS = [(world, how) for how in jobs.HOW for world in (1, 2, 4)]


@pytest.mark.supports(
    "weights stored in int8",
    stage=3,
    optimizer=lambda how: how if how.startswith("Ada") else "LOMO",
)
@pytest.mark.parametrize(
    "world, how", params(WAYS, [(2, "zero.Init"), (4, "plain"), (2, "clipped"), (1, "AdaLomo")])
)
def test_stage_3_takes_the_same_steps_as_stage_0(world, how):
    whole, begin = worlds.once(1, jobs.alike, 0, how)[0], made()
    for name in STORED:
        assert not torch.equal(
            whole[f"{name} torch.int8"], int8.Int8Weight(begin.get_parameter(name)).codes
        )
    for got in worlds.run(world, jobs.alike, 3, how):
        assert same(got, whole)


def test_partitions_are_stored_gathered_edited_and_exported(tmp_path, monkeypatch):
    for got in worlds.run(2, jobs.partitions, str(tmp_path)):
        stored, shapes = (len(STORED) + 1) * 2**16, memory.shapes_of(made())
        assert got["bf16"] - got["int8"] == (2 * stored - int8.nbytes(stored)) / 2
        monkeypatch.setattr(memory, "PERSIST", 1000)
        rule = ds_ext.LOMO.hypers()
        plan = memory.optimizer_memory(rule, shapes, 3, 2, torch.bfloat16, 70_000, in_int8=True)
        assert got["bytes"] == plan.weights
        assert got["released"] and not got["shown"] and got["most"] == 2**15
        before, after = got["edited"]
        for name, x in before.items():
            assert torch.equal(after[name], 2 * x if name == "up.0.weight" else x), name
            assert torch.equal(got["saved"][name], after[name]), name
        assert same(got["restored"], after) and same(*got["codes"])


def test_models_and_uses_that_exclude_weights_in_8_bits_are_refused():
    got, other = worlds.run(2, jobs.refusals)
    assert got == other
    fp32, persistent, moved, before, whole, after = got
    assert "embed.weight is torch.float32: load the model in torch.bfloat16" in fp32
    assert "no trainable matrix is larger than zero_optimization.stage3_param" in persistent
    stored = 'does not support weights that are stored in 8 bits ("ds_ext": {"weight_storage"'
    assert f"offload_states {stored}" in moved
    assert f"is a DTensor, and fully_shard (FSDP2) or tp_plan {stored}" in before
    assert "non-contiguous parameters" in whole  # torch's own error
    assert f"fully_shard (FSDP2) {stored}" in after
