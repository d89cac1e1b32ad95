"""Two models trained in turn, whose losses go through both: each is stepped by its own alone."""

import pytest
import torch

import ds_ext
from tests import worlds
from tests.distributed import two_models_jobs


def assert_equal_updates(got, wanted, start) -> None:
    for p, q, before in zip(got, wanted, start, strict=True):
        assert (q - before).norm() > 0
        assert (p - q).norm() <= 1e-5 * (q - before).norm() + 2**-22 * q.norm()


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("policy", ["fused", "sharded"])
def test_a_gan_as_usual(policy, detach, is_checkpointed):
    g, d = two_models_jobs.make()
    if is_checkpointed:  # what a segment's own backward pass reaches ends with the segment
        d = two_models_jobs.Checkpointed(d)
    optimizers = [ds_ext.LOMO(m.parameters(), lr=two_models_jobs.LR) for m in (g, d)]
    fused = [
        ds_ext.fuse_into_backward(m, optimizer, gradient_policy=policy)
        for m, optimizer in zip((g, d), optimizers, strict=True)
    ]
    for step in range(two_models_jobs.STEPS):
        optimizers[1].zero_grad()
        two_models_jobs.discriminating(g, d, step, 0, detach).backward()
        if not is_checkpointed:
            assert bool(fused[1].state.kept) == (policy == "sharded" or not detach)
        optimizers[1].step()
        optimizers[0].zero_grad()
        two_models_jobs.generating(g, d, step, 0).backward()
        optimizers[0].step()
    for each in fused:
        each.remove()
    params = [*g.parameters(), *d.parameters()]
    start = [p for m in two_models_jobs.make() for p in m.parameters()]
    assert_equal_updates(params, two_models_jobs.reference(1, detach), start)


@pytest.mark.parametrize(  # any two of the three values together
    "stage, policy, max_norm",
    [
        (stage, policy, max_norm)
        for stage in range(4)
        for policy, max_norm in (
            [("fused", 0.0), ("sharded", 0.1)] if stage % 2 else [("fused", 0.1), ("sharded", 0.0)]
        )
    ],
)
def test_a_gan_of_two_engines(stage, policy, max_norm):
    wanted = two_models_jobs.reference(2, True, max_norm or torch.inf)
    for got in worlds.run(2, two_models_jobs.train, stage, policy, max_norm):
        assert_equal_updates(got["after"], wanted, got["before"])


def test_ranks_end_the_backward_passes_of_many_engines_in_the_same_order():
    wanted = two_models_jobs.first_of_many_alone(2)
    for before, after in worlds.run(2, two_models_jobs.first_of_many):
        assert_equal_updates(after, wanted, before)


def test_an_engine_whose_backward_pass_has_failed_takes_no_part_in_another_engines():
    assert worlds.run(2, two_models_jobs.beside_a_failed_pass) == [0, 0]
