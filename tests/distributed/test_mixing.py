"""Several rules in one model under an engine: ``param_groups`` of the JSON config."""

import galore_torch
import pytest
import torch

from tests import worlds
from tests.common import models
from tests.common.authors import ordinary
from tests.common.choose import params
from tests.distributed import mixing

CASES = [(ranks, stage) for ranks in (2, 3) for stage in range(4)]


def by_hand(model):
    """The authors' optimizers, each of the parameters that it is for."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    ends = [n for n in named if "embed" in n or n == "up.weight"]
    vectors = [n for n in named if "norm" in n or n.endswith("bias")]
    rest = [n for n in named if n not in ends and n not in vectors]
    return [
        ordinary("adalomo", [{"params": [named[n] for n in rest]}], {"lr": 0.02}),
        galore_torch.GaLoreAdamW([named[n] for n in ends], lr=3e-3),
        torch.optim.SGD([named[n] for n in vectors], lr=0.1),
    ]


@pytest.mark.parametrize("ranks, stage", params(CASES, {(2, 1), (2, 3)}))
def test_each_parameter_is_stepped_by_its_own_rule(ranks, stage, tmp_path):
    got = worlds.run(ranks, mixing.train, stage, str(tmp_path))[0]
    assert got["identical"]
    torch.manual_seed(0)
    model = models.Zoo()
    mixing.reference(ranks, by_hand(model), model)
    square = square_error = 0.0
    for name, p in model.named_parameters():
        before, after, p = got["before"][name], got["after"][name], p.detach()
        update = (p - before).norm()
        resolution = mixing.STEPS * 2**-24 * p.norm()
        error = (after - p).norm()
        assert error <= max(1e-5 * update, resolution), name
        square, square_error = square + update**2, square_error + error**2
        resumed = (got["resumed"][name] - after).norm()
        assert resumed <= max(1e-5 * update, resolution), name
    assert square > 0 and square_error**0.5 <= 1e-5 * square**0.5
    said = " ".join(got["said"])
    assert "LOMO, lr=0.1 on: up.bias" in said and "AdaLomo on: " in said
    assert "group 2 of this checkpoint is stepped by LOMO, and here by LAMB" in got["refused"]


def test_wrong_entries_are_refused_on_all_ranks():
    entry = {"match": "nrom", "type": "LOMO"}
    for told in worlds.run(2, mixing.refused, 3, entry):
        assert "optimizer.params.param_groups[0].match: 'nrom'" in told
        assert 'Did you mean "norm"?' in told
