"""Layers in pieces and a loss in chunks: the update is that of the whole batch, on real ranks."""

import argparse

import pytest
import torch

from benchmarks.memory import llama, shapes_of
from ds_ext.planner import memory, options, rows
from tests import worlds
from tests.common import updates
from tests.common.choose import params
from tests.distributed import chunked_batch_jobs as jobs
from tests.distributed.chunked_batch_jobs import Case

CASES = [
    *(Case(stage, max_norm=norm) for stage in (0, 1, 2, 3, "fsdp2") for norm in (0.0, 0.3)),
    *(Case(stage, model="mixtral", splits=2) for stage in (0, 3)),
    *(Case(stage, model="lora") for stage in (2, 3)),
    *(Case(stage, max_norm=0.3, chunks=5) for stage in (0, 2, 3, "fsdp2")),
    Case(3, splits=1, chunks=3, model="mixtral"),
    *(Case(3, rule=rule) for rule in ("lomo", "came")),
    *(Case(stage, chunks=5, given="object") for stage in (0, 3)),
]
QUICK = [Case(2), *CASES[-1:], *(Case(stage, max_norm=0.3, chunks=5) for stage in (3, "fsdp2"))]


@pytest.mark.parametrize("case", params(CASES, QUICK))
def test_pieces_update_as_the_whole_batch(case):
    before, expected, _ = jobs.reference(case, world=2)
    for after, _ in worlds.run(2, jobs.train, case):
        assert updates.error(after, expected, before) <= 1e-5


def test_zero3_gathers_each_layer_once_for_all_pieces():
    counts = [worlds.run(2, jobs.train, Case(3, splits=n))[0][1] for n in (1, 4)]
    assert counts[1] <= counts[0]


def planned(way, stage, folder):
    """Bytes of a rank according to ``plan``."""
    llama(jobs.WIDE, torch.float32, torch.device("meta")).config.save_pretrained(folder)
    parts = jobs.PARTS if way == jobs.ACCUMULATION else 1
    text = (
        f"--model {folder} --optimizer adalomo --dtype fp32 --ranks 2 --chunked-loss "
        f"--stage {stage} --bucket {jobs.BUCKET} --seq {jobs.TOKENS} --batch {jobs.BATCH // parts}"
    )
    text += " --accumulate" if way == jobs.ACCUMULATION else ""
    text += f" --batch-splits {jobs.PARTS}" if way == jobs.PIECES else ""
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    asked = options.read(parser.parse_args(text.split()))
    plan = rows.MemoryPlan(asked)
    with jobs.chunk_like_a_part():
        return plan.total(plan.rows[0], asked.batch).total


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_peak_in_backward_is_planned_and_pieces_keep_no_gradients(stage, monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "IN_FLIGHT", 1)  # a CPU sends one bucket while the next one fills
    found = {}
    for way in (jobs.PIECES, jobs.ACCUMULATION, jobs.WHOLE):
        found[way] = worlds.run(2, jobs.peak, way, stage)[0]
        # gloo copies a rank's part of the head's gradient when it sums it, at the peak of this way
        close = 0.03 if way == jobs.ACCUMULATION else 0.02
        assert found[way] == pytest.approx(planned(way, stage, tmp_path), rel=close), way
    runs = 4 * memory.elements(shapes_of(jobs.WIDE)) / 2  # a rank's part of the gradients
    assert found[jobs.PIECES] < found[jobs.ACCUMULATION] - runs < found[jobs.WHOLE]


def test_models_that_cannot_be_split_are_refused_by_their_key():
    said = worlds.run(2, jobs.refusals, 2)
    for batch_norm, no_layers, zero, no_head, other in said:
        assert "0.1 is a batch norm, whose statistics are those of the whole batch" in batch_norm
        assert "no nn.ModuleList of at least two modules of one class" in no_layers
        assert "ds_ext.batch_splits is 0; allowed: a whole number > 0" in zero
        assert "no language model of transformers with an output head" in no_head
        assert "batch_splits = 2 has no effect under SGD, which is not a ds_ext optimizer" in other
