"""LAMB on simulated ranks is the paper's algorithm on whole parameters, to 1e-9 in fp64."""

import pytest
import torch

import ds_ext
from ds_ext.rules import all_rules
from tests.common import authors
from tests.common.simulated import Ranks
from tests.common.table import SHAPES

STEPS = 10
SETTINGS = {"defaults": {}, "decay": {"lr": 0.02, "weight_decay": 0.3}}
SETTINGS |= {"betas-eps": {"betas": (0.8, 0.95), "eps": 0.3}}
SETTINGS |= {"uncorrected": {"bias_correction": False}}
SETTINGS |= {"clamped": {"min_coeff": 0.5, "max_coeff": 1.5}, "capped": {"max_coeff": 1.0}}


FORMULA = authors.of_paper(
    all_rules.LAMB,
    authors.lamb,
    SETTINGS,
    SHAPES,
    STEPS,
    lambda case: case[1] == 3 or case[0] == "decay",
)


@pytest.mark.parametrize("p", [0.0, 2.0])
@pytest.mark.parametrize("g", [0.0, 3.0])
def test_the_ratio_is_one_where_a_norm_is_zero(p, g):
    optimizer = ds_ext.LAMB([torch.full((4,), p, requires_grad=True)], lr=0.1, eps=1e-12)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.full((4,), g)
    optimizer.step()
    ratio = p or 1.0  # u is 1 in every element, or 0
    assert torch.allclose(param.detach(), torch.full((4,), p - 0.1 * ratio * bool(g)))


def test_sums_of_squares_do_not_overflow_in_half_precision():
    # 40 * 300**2 is far above 65504, and the norm of the update too.
    p = torch.full((40,), 300.0, dtype=torch.float16)
    assert p.square().sum().isinf()
    ranks = Ranks(all_rules.LAMB(lr=0.25), [p], 3)
    ranks.step([torch.linspace(1, 60000, 40).half()])
    assert torch.equal(ranks.params[0], torch.full_like(p, 225.0))
    assert all(s["v"].dtype == torch.float32 for (s,) in ranks.states)
