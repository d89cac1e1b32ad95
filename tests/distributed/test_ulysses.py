"""Ulysses sequence parallelism with ZeRO on four real ranks, against one process."""

import pytest
import torch

from tests.common import apart
from tests.distributed.ulysses import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    out = tmp_path_factory.mktemp("ulysses") / "found.pt"
    apart.python("-m", "tests.distributed.ulysses", str(out), timeout=600)
    return torch.load(out, weights_only=False)


@pytest.mark.supports("sequence parallelism (Ulysses)", stage="stage", optimizer="optimizer")
@pytest.mark.parametrize("optimizer, stage", CASES)
def test_divided_sequences_equal_one_process(seen, optimizer, stage):
    ranks, references, _ = seen
    before, expected = (references[optimizer][key] for key in ("before", "after"))
    for rank in ranks:
        assert rank.code == 0, rank.output[-3000:]
        after = rank.result[optimizer, stage]
        assert isinstance(after, dict), after
        difference = torch.cat([(after[n] - expected[n]).flatten() for n in before]).norm()
        update = torch.cat([(expected[n] - before[n]).flatten() for n in before]).norm()
        assert difference / update <= 1e-5


def test_a_config_that_would_leave_gradients_apart_is_refused(seen):
    for rank in seen[2]:
        assert rank.result.startswith("sequence_parallel_size = 2"), rank.output[-2000:]
