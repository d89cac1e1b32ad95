"""Odd states, second forward passes, others' parameters and edited groups beside each layout."""

import pytest
import torch

from tests import worlds
from tests.common.choose import params
from tests.distributed import parallel_layouts_jobs

STAGES = {"tensor parallelism": (0, 3), "sequences": (1, 3), "experts": (1, 2), "offload": (2, 3)}
LAYOUTS = [(layout, stage) for layout, stages in STAGES.items() for stage in stages]
QUICK = [("tensor parallelism", 0), ("sequences", 3), ("experts", 1), ("offload", 3)]

TWO = [(*at, *how) for at in LAYOUTS for how in ((1, 0.0), (1, 0.05), (2, 0.0))]


@pytest.mark.parametrize(
    "layout, stage, passes, norm", params(TWO, [("experts", 1, 1, 0.05), ("sequences", 3, 2, 0.0)])
)
def test_a_loss_of_two_forward_passes_is_exact(layout, stage, passes, norm):
    for error in worlds.run(2, parallel_layouts_jobs.two_forwards, layout, stage, passes, norm):
        assert error <= 1e-5


@pytest.mark.parametrize("layout, stage", params(LAYOUTS, QUICK[:3]))
def test_one_projected_gradient_is_as_good_as_a_whole_one(layout, stage):
    for error in worlds.run(2, parallel_layouts_jobs.projected, layout, stage):
        assert error <= 1e-5


FOREIGN = [(*at, policy) for at in LAYOUTS for policy in ("fused", "sharded")]


@pytest.mark.parametrize("layout, stage, policy", params(FOREIGN, [("offload", 3, "fused")]))
def test_exact_clipping_leaves_gradients_of_others_alone(layout, stage, policy):
    for got in worlds.run(2, parallel_layouts_jobs.foreign, layout, stage, policy):
        assert got["off"] <= 1e-6 and got["error"] <= 1e-5


EDITED = [(*at, passes) for at in LAYOUTS for passes in (1, 2)]


@pytest.mark.parametrize("layout, stage, passes", params(EDITED, [(*at, 1) for at in QUICK[1:3]]))
def test_edits_of_groups_are_followed(layout, stage, passes):
    for got in worlds.run(2, parallel_layouts_jobs.edited, layout, stage, passes):
        assert got["error"] <= 1e-5
        out, later = zip(*got["stayed"], strict=True)
        assert out == (False, False, False, True, False, False)  # while it was in no group
        assert later == (False, False, False, False, False, True)  # after its group was removed


@pytest.mark.parametrize("layout, stage", params(LAYOUTS, QUICK[:1]))
def test_a_checkpoint_of_edited_groups_is_gone_on_from(layout, stage):
    for got in worlds.run(2, parallel_layouts_jobs.saved_between, layout, stage):
        assert got["same"]
        assert got["rates"][0] == got["rates"][1] == pytest.approx([0.01, 0.03])


@pytest.mark.parametrize("layout, stage", params(LAYOUTS, QUICK[3:]))
def test_states_of_another_dtype_are_loaded_by_other_numbers_of_ranks(layout, stage, tmp_path):
    for told in worlds.run(2, parallel_layouts_jobs.saved, layout, stage, str(tmp_path)):
        assert "replaced by a tensor of another size" in told
    assert not (tmp_path / "resized").exists()
    for world in (2, 4) if layout == "tensor parallelism" else (1, 3):
        for got in worlds.run(world, parallel_layouts_jobs.loaded, layout, stage, str(tmp_path)):
            assert got["error"] <= 1e-5
            assert got["dtypes"] == {torch.float32}
            assert got["same"] and "saved with AdamW, but the optimizer is CAME" in got["told"]
