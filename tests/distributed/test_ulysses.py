"""Ulysses sequence parallelism with ZeRO on four real ranks, against one process."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.common.hypers import CLOSE
from tests.common.updates import error
from tests.distributed import ulysses_jobs
from tests.distributed.ulysses_jobs import CASES
from tests.tools.support import of

QUICK = ["lomo-1", "came-0", "adalomo-3-saved", "muon-3"]


@pytest.mark.supports("sequence parallelism (Ulysses)", **of(CASES))
@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_divided_sequences_equal_one_process(name):
    case, found = CASES[name], worlds.once(4, ulysses_jobs.train, CASES[name])
    before, expected, norms = ulysses_jobs.whole(case.rule, 2, found[0]["told"])
    clip = ulysses_jobs.clip_of(case.rule)
    assert min(norms) > 1.2 * clip  # or it would show nothing
    for got in found:
        assert got["alike"]
        assert got["norms"] == pytest.approx(norms, rel=1e-4)
        assert error(got["after"], expected, before) <= CLOSE.get(case.rule, 1e-5)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all():
    for got in worlds.once(4, ulysses_jobs.not_finite):
        assert got["same"] == {"up.weight"} and got["finite"]


def test_sizes_and_groups_that_do_not_fit_are_refused_on_every_rank():
    for told in worlds.once(4, ulysses_jobs.refusals):
        for name in ("no mpu", "a mesh", "another size"):
            assert told[name].startswith("sequence_parallel_size = "), told
            assert "initialize_sequence_parallel" in told[name] and "as mpu" in told[name]
        assert "keeps the mpu of an earlier engine" in told["of an earlier engine"], told
        assert "would not sum the gradients of the ranks that share" in told["a mesh alone"], told
        assert "together with tensor_parallel.autotp_size = 2" in told["tensors"]
        assert told["tensors and an mpu"].startswith("tensor_parallel.autotp_size = 2")
