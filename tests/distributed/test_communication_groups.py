"""Sums travel on process groups of their own where collectives wait for each other.

Here over gloo, where they need not.
"""

import pytest

from tests import worlds
from tests.distributed import communication_groups_jobs
from tests.distributed.test_faults import LOST


def test_a_group_of_their_own_gives_the_same_bits_and_is_made_once():
    for rank in worlds.run(2, communication_groups_jobs.twice):
        for stage, weights in enumerate(rank["apart"]):
            plain = rank["plain"][stage % len(communication_groups_jobs.STAGES)]
            assert weights.keys() == plain.keys()
            assert all(weights[name].equal(plain[name]) for name in plain)
        assert rank["is_used"] and len(set(rank["counts"])) == 1


def test_streams_change_no_bit_and_nothing_runs_too_early():
    for rank in worlds.run(2, communication_groups_jobs.on_streams):
        assert rank["errors"] == []
        for plain, found in zip(rank["plain"], rank["found"], strict=True):
            assert all(found[name].equal(plain[name]) for name in plain)
        assert rank["ahead"] == [False, True, True]  # stages 3, 2, 0: at stage 3 ranks need not ask


def test_it_waits_as_long_as_the_others():
    for before, in_engine, of_all in worlds.run(2, communication_groups_jobs.limits):
        assert before == 77
        assert in_engine == of_all != 77


def test_a_group_that_was_destroyed_is_made_anew():
    # Torch names it by the number of groups: the next one of this name would wait for the last.
    assert worlds.run(2, communication_groups_jobs.renewed, limit=60)[0] >= 4


@pytest.mark.parametrize("has_own_groups", [True, False])
def test_a_lost_rank_is_told_without_an_engine_too(has_own_groups):
    other, victim = worlds.fresh(2, communication_groups_jobs.killed, has_own_groups, timeout=60)
    assert (other.code, victim.code) == (1, -9)
    assert LOST in other.output and other.seconds < 30
