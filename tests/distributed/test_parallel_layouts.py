"""Odd states, second forward passes, others' parameters and edited groups beside each layout."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.distributed import parallel_layouts_jobs

STAGES = {"tensor parallelism": (0, 3), "sequences": (1, 3), "experts": (1, 2), "offload": (2, 3)}
LAYOUTS = [(layout, stage) for layout, stages in STAGES.items() for stage in stages]
QUICK = [("tensor parallelism", 0), ("sequences", 3), ("experts", 1), ("offload", 3)]


@pytest.mark.parametrize("layout, stage", params(LAYOUTS, QUICK[:3]))
def test_one_projected_gradient_is_as_good_as_a_whole_one(layout, stage):
    for error in worlds.run(2, parallel_layouts_jobs.projected, layout, stage):
        assert error <= 1e-5


EDITED = [(*at, *how) for at in LAYOUTS for how in ((1, 0.0), (1, 0.05), (2, 0.05))]


@pytest.mark.parametrize(
    "layout, stage, passes, max_norm",
    params(EDITED, [("experts", 1, 1, 0.05), ("sequences", 3, 2, 0.05), ("offload", 3, 1, 0.05)]),
)
def test_edits_of_groups_are_followed_by_any_loss(layout, stage, passes, max_norm):
    job = parallel_layouts_jobs.edited
    for got in worlds.run(2, job, layout, stage, passes, max_norm):
        assert got["error"] <= 1e-5 and got["off"] <= 1e-6
        out, later = zip(*got["stayed"], strict=True)
        assert out == (False, False, False, True, False, False)  # while it was in no group
        assert later == (False, False, False, False, False, True)  # after its group was removed


@pytest.mark.parametrize("layout, stage", params(LAYOUTS, QUICK[3:]))
def test_states_of_another_dtype_are_loaded_by_other_numbers_of_ranks(layout, stage, tmp_path):
    worlds.run(2, parallel_layouts_jobs.saved, layout, stage, str(tmp_path))
    assert not (tmp_path / "resized").exists()
    for world in (2, 4) if layout == "tensor parallelism" else (1, 3):
        worlds.run(world, parallel_layouts_jobs.loaded, layout, stage, str(tmp_path))


@pytest.mark.parametrize("world, zero", params([(2, 0), (2, 1), (4, 1)], [(2, 1)]))
def test_edits_of_groups_are_followed_by_a_pipeline_and_saved(world, zero):
    ranks = worlds.run(world, parallel_layouts_jobs.piped, zero)
    before = {n: p for rank in ranks for n, p in rank["before"].items()}
    special = parallel_layouts_jobs.PIPELINE
    alone = parallel_layouts_jobs.alone_by_torch(special, special.loss_alone, start=before)
    for rank in ranks:
        assert parallel_layouts_jobs.error(rank["after"], alone) <= 1e-5
