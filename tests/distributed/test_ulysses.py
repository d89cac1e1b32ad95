"""Ulysses sequence parallelism with ZeRO on four real ranks, against one process."""

import pytest

from tests import worlds
from tests.common.choose import params
from tests.common.hypers import CLOSE
from tests.common.updates import error
from tests.distributed import ulysses_jobs
from tests.distributed.ulysses_jobs import CASES
from tests.tools.support import of

QUICK = [
    *("lomo-1-mpu", "came-0-mesh", "adalomo-3-mesh-saved", "came-1-config"),
    *("lomo-1-tensor", "muon-3-tensor"),
]


def _feature(name):
    beside = " with tensor parallelism" if CASES[name].told == "tensor" else ""
    return "sequence parallelism (Ulysses)" + beside


@pytest.mark.supports(_feature, **of(CASES))
@pytest.mark.parametrize("name", params(CASES, QUICK))
def test_divided_sequences_equal_one_process(name):
    case, found = CASES[name], worlds.once(4, ulysses_jobs.train, CASES[name])
    whole = ulysses_jobs.whole(case.rule, case.pairs, found[0]["told"])
    before, expected, norms = whole.values()
    clip = ulysses_jobs.clip_of(case.rule)
    assert min(norms) > 1.2 * clip  # or it would show nothing
    for got in found:
        assert got["alike"]
        assert got["norms"] == pytest.approx(norms, rel=1e-4)
        assert error(got["after"], expected, before) <= CLOSE.get(case.rule, 1e-5)


@pytest.mark.parametrize("told", ["config", "tensor"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(told):
    for got in worlds.once(4, ulysses_jobs.not_finite, told):
        assert got["same"] == {"up.weight"} and got["finite"]


def test_all_ranks_may_divide_one_sequence():
    assert worlds.run(2, ulysses_jobs.one_sequence_on_all_ranks) == [2, 2]


def test_sizes_and_groups_that_do_not_fit_are_refused_on_every_rank():
    for told in worlds.once(4, ulysses_jobs.refusals):
        assert told["too many"].startswith("sequence_parallel_size = 3 does not divide the 4 ranks")
        assert "tensor_parallel.autotp_size = 2" in told["too many with tensors"]
        for name in ("mesh with tensors", "mpu with tensors"):
            assert told[name].startswith(
                "tensor_parallel.autotp_size = 2: sequence parallelism from mpu"
            )
        assert told["another size"].startswith("sequence_parallel_size = 4, but the mpu's")
