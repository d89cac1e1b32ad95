"""Stacks of experts under rules for matrices: each expert is stepped as a matrix of its own."""

import pytest
from torch import nn

from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.optimizer import OPTIMIZERS, expert_stacks
from ds_ext.rules import REGISTRY
from tests.common import table
from tests.common.hypers import SIMULATED
from tests.common.simulated import EXACT, errors

SHAPE = (4, 13, 6)
MATRICES = [name for name, entry in REGISTRY.items() if not entry.any_shape]


class Experts(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.num_experts, self.weight = len(values), nn.Parameter(values.clone())


@pytest.mark.parametrize("name", MATRICES)
def test_an_expert_is_stepped_as_a_matrix_of_its_own(name):
    (before,), steps = table.weights([SHAPE]), table.gradients(5, [SHAPE])
    model = Experts(before)
    optimizer = OPTIMIZERS[name]([model.weight], **SIMULATED[name]).separate_experts(model)
    apart = [nn.Parameter(expert.clone()) for expert in before]
    alone = OPTIMIZERS[name](apart, **SIMULATED[name])
    streams = set()
    for (grads,) in steps:
        model.weight.grad = grads.clone()
        optimizer.step()
        experts = optimizer.state[model.weight][expert_stacks.EXPERTS].values()
        for p, g, expert in zip(apart, grads, experts, strict=True):
            p.grad = g.clone()
            if not alone.state[p]:
                parts = alone.state_spec(p, Shard.whole(p.shape), alone.rule_of(p))
                # the random numbers of the expert, if the rule draws any
                stream = int(expert.get("stream", 0))
                alone.state[p].update(zeros(parts, p.detach(), stream), step=0)
                streams.add(stream)
        alone.step()
    assert len(streams) == (len(before) if "stream" in next(iter(experts)) else 1)
    after = list(model.weight.detach())
    assert max(errors(after, [p.detach() for p in apart], list(before))) <= EXACT
