"""Uses of a module that count for the backward pass to come, and those that do not."""

import pytest
import torch
from torch import nn

import ds_ext
from tests.common import models
from tests.common.plain import weights
from tests.common.states import same


class WithValueHead(nn.Module):
    """A language model and a value head, as for reinforcement learning."""

    def __init__(self, checkpointing: str | None) -> None:
        super().__init__()
        self.inner = models.make(checkpointing)
        self.value = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens) * self.value

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor) -> None:
        for _ in range(3):
            self.inner(tokens)


def make(checkpointing: str | None, fuse: bool = True):
    model = WithValueHead(checkpointing)
    optimizer = ds_ext.AdaLomo(model.parameters(), lr=1e-3)
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=1) if fuse else None
    return model, optimizer, fused


def check_steps(checkpointing, loss_of):
    """Compares fused steps with plain ones, and which weights backward alone steps."""
    in_parts = IN_PARTS.get(checkpointing, set())
    model, optimizer, fused = make(checkpointing)
    plain, ordinary, _ = make(checkpointing, fuse=False)
    for step in range(3):
        tokens, before = models.batch(step, 1)[0], weights(model)
        loss = loss_of(model, tokens)
        uses = fused.buckets.uses
        assert {n for n, p in model.named_parameters() if uses.in_parts([p])} == in_parts
        loss.backward()
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        optimizer.step()
        ordinary.zero_grad()
        loss_of(plain, tokens).backward()
        assert moved == {n for n, p in plain.named_parameters() if p.grad is not None} - in_parts
        ordinary.step()
    assert same(weights(model), weights(plain))


WAYS = [None, "reentrant", "nonreentrant"]
IN_PARTS = {"reentrant": {"inner.shared.weight", "inner.shared.bias"}}


@pytest.mark.parametrize("checkpointing", WAYS)
def test_generating_by_a_part_of_the_model_between_steps_does_not_count(checkpointing):
    def loss_of(model, tokens):
        model.generate(tokens)
        loss = model(tokens)
        model.generate(tokens)  # to look at it before backward
        return loss

    check_steps(checkpointing, loss_of)


@pytest.mark.parametrize("checkpointing", WAYS[1:])
def test_segments_count_where_a_part_of_the_model_is_called_by_itself(checkpointing):
    def loss_of(model, tokens):
        return model.inner(tokens)

    check_steps(checkpointing, loss_of)


def test_a_forward_that_raised_leaves_no_call_behind():
    model, _, fused = make("reentrant")
    with pytest.raises(IndexError):
        model(torch.full((1, models.LENGTH), models.VOCAB))
    model.generate(models.batch(0, 1)[0])
    assert not fused.buckets.uses.calls.made
    assert not fused.buckets.uses.in_parts([model.inner.shared.weight])
