"""Gradients that are summed in 4 bits: rules step by what has arrived, exactly."""

import pytest
import torch

from tests import worlds
from tests.common.by_role import MATRICES
from tests.common.choose import params
from tests.common.hypers import CLOSE
from tests.distributed import four_bits

# A rule, the norm that gradients are clipped to, hosts and their ranks.
CASES = [("lomo", 0.0, 2, 2), ("adalomo", 0.0, 2, 2), ("came", 20.0, 2, 2), ("lamb", 0.0, 2, 2)]
CASES += [(rule, 20.0, 2, 2) for rule in MATRICES]


@pytest.mark.supports("ZeRO++ quantized gradients", stage=3, optimizer=lambda case: case[0])
@pytest.mark.parametrize("case", params([(case,) for case in CASES], [(CASES[1],)]), ids=str)
def test_a_step_is_that_of_the_gradients_that_numpy_rounds(case):
    _, _, hosts, size = case
    for got in worlds.once(hosts * size, four_bits.both, *case):
        found, expected = got["found"], got["expected"]
        assert found["identical"]
        for n, update in expected["moved"].items():
            error = (found["moved"][n] - update).norm() / update.norm()
            assert error < CLOSE.get(case[0], 1e-5), (n, float(error))
        most = 0.6 if case[0] == "muon" else 0.4  # it sums products of matrices, too
        assert found["bytes"] < most * expected["bytes"]
    (told,) = worlds.once(hosts * size, four_bits.both, *case)[0]["found"]["said"]
    assert "3 of 5 parameters are summed in 4 bits, inside hosts of 2 ranks" in told


# A scale of DeepSpeed's is of as many elements as a matrix's smaller side has.
@pytest.mark.parametrize("side, more", params([(256, 1.0), (1024, 1.12)], [(1024, 1.12)]))
def test_the_error_beside_deepspeeds(side, more):
    for got in worlds.once(4, four_bits.deepspeeds, (side, 1024), 2, 2):
        assert got["ours"] == pytest.approx(0.157, rel=0.05)
        assert got["theirs"] == pytest.approx(more * got["ours"], rel=0.05)


def test_hosts_of_different_sizes_are_refused():
    for told in worlds.once(3, four_bits.refused, 2):
        assert "zero_quantized_gradients = True" in told and "2 of the 3 ranks" in told


UNEVEN = {
    "zero_quantized_gradients": {"zero": {"zero_quantized_gradients": True}},
    "sum_group_size": {"top": {"ds_ext": {"sum_group_size": "host"}}},
}


@pytest.mark.parametrize("key", UNEVEN)
def test_ranks_that_count_otherwise_all_tell_it(key):
    for told in worlds.once(3, four_bits.uneven, UNEVEN[key]):
        assert key in told and "LOCAL_WORLD_SIZE is 2, 1" in told


def test_one_host_sums_as_they_are():
    for got in worlds.once(2, four_bits.both, "adalomo", 0.0, 1, 2):
        for n, update in got["expected"]["moved"].items():
            assert torch.equal(got["found"]["moved"][n], update)
    (told,) = worlds.once(2, four_bits.both, "adalomo", 0.0, 1, 2)[0]["found"]["said"]
    assert "all 2 ranks are on one host" in told
