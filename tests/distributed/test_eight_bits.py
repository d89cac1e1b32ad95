"""Weights that are gathered in 8 bits: forward sees these, and what is stepped is exact."""

import pytest
import torch

from tests import worlds
from tests.common.by_role import MATRICES
from tests.common.choose import params
from tests.distributed import eight_bits

BF16 = {"bf16": {"enabled": True}}
CASES = [(2, "adalomo", {}), (2, "came", BF16), (4, "lamb", {"ds_ext": {"shard_size": 2}})]
CASES += [(2, rule, {}) for rule in MATRICES]


@pytest.mark.supports(
    "ZeRO++ quantized weights, by a stand-in for the quantizer",
    stage=3,
    optimizer=lambda case: case[1],
)
@pytest.mark.parametrize("case", params([(case,) for case in CASES], [(CASES[0],)]), ids=str)
def test_a_step_of_given_gradients_is_the_same_bits(case):
    ranks, rule, more = case
    found = worlds.once(ranks, eight_bits.both, rule, more)
    told = [line for line in found[0]["said"] if "zero_quantized_weights" in line]
    assert len(told) == 1 and "2 of 4 parameters are gathered without quantization" in told[0]
    for got in found:
        plain, quantized = got["plain"], got["quantized"]
        for n, p in plain["after"].items():
            assert torch.equal(p, quantized["after"][n]), n
        assert quantized["identical"]
        assert all(off == 0 for at in plain["off"] for off in at.values())
        for at in quantized["off"]:
            assert at["small"] == at["odd"] == 0  # gathered as they are
            assert all(1e-3 < at[n] < 2e-2 for n in ("wide", "tall"))
