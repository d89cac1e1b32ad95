"""Which gradients are reduced together, what a step of many parameters costs the host, and which
uses of a module count for the backward pass to come. A bucket's votes and its plan, kept from step
to step, follow all that they depend on.
"""

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.backward import buckets, reduction
from ds_ext.backward.receivers import Stepper
from ds_ext.distributed.layout import Layout
from ds_ext.distributed.placement import Replicated
from ds_ext.ops.executors import unbatched
from ds_ext.optimizer import plain_step
from tests import worlds
from tests.common import models, needs, paths
from tests.common.choose import params
from tests.common.plain import fuse, weights
from tests.common.spies import noted
from tests.common.states import same


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 64, bias=False)
        self.back = nn.Linear(64, 8, bias=False)

    def forward(self, x):
        return self.back(torch.tanh(self.linear(self.norm(x))))


@pytest.fixture
def sent(monkeypatch):
    """Sizes of the parameters of each bucket that is reduced."""
    return noted(
        monkeypatch,
        reduction.Reduction,
        "begin",
        lambda self, params, *_: [p.numel() for p in params],
    )


@pytest.mark.parametrize(
    "size, tiny, expected",
    [
        # From the last layer to the first: back, linear, and two vectors of the norm.
        (512, {}, [[512], [512], [8, 8, 512], [512], [8, 8]]),  # few elements take one more
        (257, {}, [[512], [512], [8, 8, 512], [512], [8, 8]]),  # of any size
        (256, {}, [[512], [512], [8, 8], [512], [512], [8, 8]]),  # 16 are a sixteenth, and not few
        (1024, {}, [[512, 512], [8, 8, 512], [512, 8, 8]]),
        (1056, {}, [[512, 512, 8, 8], [512, 512, 8, 8]]),
        (1, {}, [[512], [512], [8], [8], [512], [512], [8], [8]]),
        (None, {}, [[512], [512], [8, 8, 512], [512], [8, 8]]),  # as many as the largest has
        # Tiny ones wait for the end of backward, unless they fill as much as "MIN_FILL".
        (1056, {"SMALL": 8 / 1056}, [[512, 512], [512, 512], [8, 8, 8, 8]]),
        (1056, {"SMALL": 8 / 1056, "MIN_FILL": 16 / 1056}, [[512, 512, 8, 8], [512, 512, 8, 8]]),
    ],
)
def test_small_parameters_join_a_bucket_and_large_ones_fill_it(
    sent, monkeypatch, size, tiny, expected
):
    for name, value in tiny.items():
        monkeypatch.setattr(buckets, name, value)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(3, 8)
    model(x).square().sum().backward()
    stepped = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    model.zero_grad()
    _, optimizer = fuse(model, bucket_size=size)
    model(x).square().sum().backward()
    optimizer.step()
    assert sent == expected
    for p, expected_p in zip(model.parameters(), stepped, strict=True):
        torch.testing.assert_close(p.detach(), expected_p)


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
    fused, optimizer = fuse(model, bucket_size=bucket_size, gradient_policy=policy)
    loss = model()
    made = calls(loss.backward) + calls(optimizer.step)
    fused.remove()
    assert all(torch.allclose(p, torch.full((2,), 0.8)) for p in model.parameters())
    return made


def is_linear(few: int, many: int) -> bool:
    return many <= few * MANY / FEW * 1.2


@pytest.mark.parametrize("bucket_size", params([10, 2**20], [10]))
@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_a_step_is_linear_in_the_number_of_parameters(policy, bucket_size):
    assert is_linear(step(FEW, policy, bucket_size), step(MANY, policy, bucket_size))


@pytest.mark.slow
def test_a_step_of_two_ranks_is_linear_in_the_number_of_parameters():
    few, many = (worlds.run(2, step, n, "fused", 20)[0] for n in (FEW, MANY))
    assert is_linear(few, many)


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


def made():
    """Parameters and their optimizer: rounds check the first two, and AdamW's need votes."""
    params = [nn.Parameter(torch.ones(shape)) for shape in ((6, 4), (2, 6, 4), (6, 4))]
    groups = [{"params": params[:2]}, {"params": params[2:], "type": "AdamW"}]
    return params, ds_ext.SCALE(groups, momentum=0.0, norm_axis="column")


def move_one_parameter_and_add_another(optimizer):
    first, second = optimizer.param_groups
    second["params"] += [first["params"].pop(), nn.Parameter(torch.ones(3))]
    optimizer.follow_groups()


def change_dtype(optimizer):
    (param,) = optimizer.param_groups[1]["params"]
    param.data = param.data.double()  # no kernel reads it


CHANGES = {
    "rule": lambda optimizer: optimizer.param_groups[0].update(momentum=0.9),
    "another parameter": move_one_parameter_and_add_another,
    "experts": lambda o: setattr(o, "stacks", {o.param_groups[0]["params"][1]: 0}),
    "dtype": change_dtype,
}


@needs.triton
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_votes_follow_a_change(change, monkeypatch):
    paths.use(monkeypatch, "kernels")
    (params, optimizer), placement = made(), Replicated(None)
    layout = Layout(None, {p: str(i) for i, p in enumerate(params)}, lambda _: placement)
    stepper = Stepper(optimizer, layout, has_bounds=False)
    before = stepper.voted_params(params)
    assert before.device == {2} and not before.host
    optimizer.param_groups[0]["lr"] = 0.5
    assert stepper.voted_params(params) is before
    change(optimizer)
    assert stepper.voted_params(params) != before
    for bucket in (params, params[:1], params[1:], params[::-1]):
        new = Stepper(optimizer, layout, has_bounds=False)
        assert stepper.voted_params(bucket) == new.voted_params(bucket)


@pytest.mark.parametrize("path", paths.EACH[1:])
def test_the_table_of_a_bucket_of_gradients_is_kept(path, monkeypatch):
    paths.use(monkeypatch, path)
    made = []
    noted(monkeypatch, unbatched, "new_table", lambda *given: made.append(given))
    for sizes in ((5, 3), (3, 5), (5, 3)):
        runs = [torch.full((n,), 2.0) for n in sizes]
        assert unbatched.square_sums_of(runs).tolist() == [4 * n for n in sizes]
    assert len(made) == 2  # one for each order of sizes


def test_a_plan_of_another_rule_never_fits_again(monkeypatch):
    """Not even after it was asked once."""
    paths.use(monkeypatch, "native")
    params, optimizer = made()
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    ((_, plan),) = optimizer._plans.items()
    updates, states = plain_step.updates(params), [optimizer.state[p] for p in params]
    optimizer.param_groups[0]["lr"] = 0.5
    assert plan.fits(optimizer, updates, states) and plan.rules[0].lr == 0.5
    optimizer.param_groups[0]["norm_axis"] = "row"
    for _ in range(2):
        assert not plan.fits(optimizer, updates, states)
