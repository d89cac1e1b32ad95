"""Layers in pieces and a loss in chunks: the update is that of the whole batch, on real ranks."""

import pytest

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


def test_models_that_cannot_be_split_are_refused_by_their_key():
    said = worlds.run(2, jobs.refusals, 2)
    for batch_norm, no_layers, zero, no_head, other in said:
        assert "0.1 is a batch norm, whose statistics are those of the whole batch" in batch_norm
        assert "no nn.ModuleList of at least two modules of one class" in no_layers
        assert "ds_ext.batch_splits is 0; allowed: a whole number > 0" in zero
        assert "no language model of transformers with an output head" in no_head
        assert "batch_splits = 2 has no effect under SGD, which is not a ds_ext optimizer" in other
