"""Engines whose weights are stored in 8 bits: the same codes on all ranks and at all stages."""

import pytest
import torch

from tests import worlds
from tests.common.choose import params
from tests.common.int8_model import STORED
from tests.common.states import same
from tests.distributed import storing_int8 as jobs


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("int8")
    return lambda *names: str(base / " ".join(map(str, names)))


@pytest.mark.supports("weights stored in int8", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize(
    "world, stage", params([(w, s) for w in (2, 1) for s in (0, 1, 2)], [(2, 2)])
)
def test_ranks_store_the_same_codes_and_go_on_from_a_checkpoint(folder, world, stage):
    got = worlds.once(world, jobs.run, stage, folder(world, stage))
    for rank in got[1:]:
        assert all(same(x, y) for x, y in zip(got[0], rank, strict=True) if isinstance(x, dict))
    begin, halfway, loaded, after, again, saved, (half, edited), most = got[0]
    assert not any(torch.equal(halfway[name], begin[name]) for name in STORED)
    assert same(loaded, halfway) and same(again, after) and not same(after, halfway)
    assert all(x.dtype == torch.bfloat16 for x in saved.values())
    assert torch.equal(half, edited.float())
    assert most == max(x.numel() for name, x in saved.items() if name in STORED)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_stages_store_the_same_codes(folder, world):
    first, *others = (worlds.once(world, jobs.run, s, folder(world, s))[0][3] for s in (0, 1, 2))
    assert all(same(first, other) for other in others)


def test_settings_without_weights_in_8_bits_are_refused_by_their_key():
    got, other = worlds.run(2, jobs.refusals)
    assert got == other
    stage3, offload, experts, value, master, fp32, moved, before, whole, after = got
    asked = 'ds_ext cannot honour ds_ext.weight_storage = "int8" together with'
    assert f"{asked} zero_optimization.stage = 3 yet: remove one." in stage3
    assert f"{asked} zero_optimization.offload_optimizer.device = 'cpu'" in offload
    assert f"{asked} expert_parallel.enabled = True" in experts
    assert "ds_ext.weight_storage is 'int4'; allowed: \"int8\" or null" in value
    assert "weight_update = 'master' does not support weights" in master
    assert "embed.weight is torch.float32: load the model in torch.bfloat16" in fp32
    stored = 'does not support weights that are stored in 8 bits ("ds_ext": {"weight_storage"'
    assert f"offload_states {stored}" in moved
    assert f"is a DTensor, and fully_shard (FSDP2) or tp_plan {stored}" in before
    assert "non-contiguous parameters" in whole  # torch's own error
    assert f"fully_shard (FSDP2) {stored}" in after
