"""Ulysses sequence parallelism with ZeRO on four real ranks, against one process."""

import pytest
import torch

from tests import worlds
from tests.common.choose import params
from tests.distributed import ulysses
from tests.distributed.ulysses import CASES

QUICK = [("lomo", 1), ("came", 3)]


@pytest.mark.supports("sequence parallelism (Ulysses)", stage="stage", optimizer="optimizer")
@pytest.mark.parametrize("optimizer, stage", params(CASES, QUICK))
def test_divided_sequences_equal_one_process(optimizer, stage):
    before, expected, norms = ulysses.whole(optimizer).values()
    clip = ulysses.clip_of(optimizer)
    assert min(norms) > 1.2 * clip  # or it would show nothing
    for got in worlds.once(4, ulysses.train, optimizer, stage):
        after = got["after"]
        assert got["norms"] == pytest.approx(norms, rel=1e-4)
        difference = torch.cat([(after[n] - expected[n]).flatten() for n in before]).norm()
        update = torch.cat([(expected[n] - before[n]).flatten() for n in before]).norm()
        assert difference / update <= 1e-5


def test_a_config_that_would_leave_gradients_apart_is_refused():
    for told in worlds.once(2, ulysses.by_config):
        assert told.startswith("sequence_parallel_size = 2"), told
