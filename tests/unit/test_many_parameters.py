"""What a step costs the host grows with the number of parameters, and no faster."""

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ds_ext
from tests import worlds

FEW, MANY = 100, 800


class Many(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(n))

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.weights)).square().sum()


def calls(action: Callable[[], object]) -> int:
    """How many Python functions ran, or went on."""
    with cProfile.Profile() as profile:
        action()
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def step(n: int, policy: str, bucket_size: int) -> int:
    model = Many(n)
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.1)
    fused = ds_ext.fuse_into_backward(
        model, optimizer, bucket_size=bucket_size, gradient_policy=policy
    )
    loss = model()
    made = calls(loss.backward) + calls(optimizer.step)
    fused.remove()
    assert all(torch.allclose(p, torch.full((2,), 0.8)) for p in model.parameters())
    return made


def is_linear(few: int, many: int) -> bool:
    return many <= few * MANY / FEW * 1.2


@pytest.mark.parametrize("bucket_size", [10, 2**20])
@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_a_step_is_linear_in_the_number_of_parameters(policy, bucket_size):
    assert is_linear(step(FEW, policy, bucket_size), step(MANY, policy, bucket_size))


def test_a_step_of_two_ranks_is_linear_in_the_number_of_parameters():
    few, many = (worlds.run(2, step, n, "fused", 20)[0] for n in (FEW, MANY))
    assert is_linear(few, many)
