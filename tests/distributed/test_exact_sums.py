"""Moments of 8 bits and bf16 weights on real ranks, by gradients whose sums are exact.

Elsewhere sums differ in their last bits, which makes some codes jump. Here none may: what is left
are the last bits of weights, which ranks that have parts of groups compute in another way.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_ext
from ds_ext.checkpoint import resharding
from ds_ext.engine.checkpoint_contents import owned
from tests import worlds
from tests.common import authors, engines, models, plain, table
from tests.common.choose import params
from tests.common.ranks import whole

STEPS = 6
# What moments of 8 bits round in groups of 32, which are cut in the first, the third and the last.
SHAPES = ((70, 33), (64, 32), (1500,), (7, 31, 9), (33,))
RULES: dict[str, dict[str, Any]] = {
    "FlashAdamW": {"lr": 0.02, "weight_decay": 0.1},
    "Lion": {"lr": 0.02, "weight_decay": 0.1, "nbits": 8},
}


def gradients(step: int, rank: int) -> list[Tensor]:
    """A rank's, multiples of 6 of which fp32 holds the mean of 2 or 3 ranks in any order."""
    generator = torch.Generator().manual_seed(31 * step + rank)
    numbers = (torch.randint(-(2**18), 2**18, shape, generator=generator) for shape in SHAPES)
    return [n * 6 * 2.0**-21 for n in numbers]


def train(name: str, stage: int) -> dict[str, Any]:
    optimizer = {"type": f"ds_ext.{name}", "params": RULES[name]}
    zero = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 40}
    model = models.Given(table.weights(SHAPES, torch.float32))
    engine = engines.start(model, None, stage, optimizer=optimizer, zero=zero)
    found = engines.trained(engine, lambda model, *of: model(gradients(*of)), STEPS)
    kept = resharding.save_state(engine.optimizer.optimizer, owned(engine.optimizer.layout))
    return {"after": found["after"], "state": kept}


WHOLE = ((13, 29), (7,))


def small(step: int) -> list[Tensor]:
    """The same small whole numbers on every rank, whose sums are exact."""
    return [torch.arange(13 * 29).view(13, 29) * (step + 3) % 7 - 3, torch.arange(7) + step]


def bits(stage: int | str, weight_update: str) -> dict[str, torch.Tensor]:
    """bf16 weights after steps whose gradients do not depend on the number of ranks."""
    model = models.Given(table.weights(WHOLE, torch.float32))
    hypers = {"lr": 1e-3, "weight_update": weight_update, "seed": 5}
    if stage == "fsdp2":
        fully_shard(model.bfloat16(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        engine = engines.start(model, ds_ext.LOMO(model.parameters(), **hypers), None)
    else:
        lomo = {"type": "LOMO", "params": hypers}
        engine = engines.start(model, None, stage, optimizer=lomo, bf16={"enabled": True})
    engines.train(engine, lambda model, step, rank: model(small(step)), 10)
    return whole(model)


def bits_reference(weight_update: str) -> dict[str, torch.Tensor]:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        groups = [{"params": [p]} for p in params]
        return ds_ext.LOMO(groups, lr=1e-3, weight_update=weight_update, seed=5)

    steps = [small(step) for step in range(10)]
    weights, _ = plain.stepped(make, table.weights(WHOLE, torch.bfloat16), steps)
    return {f"weights.{i}": p for i, p in enumerate(weights)}


CASES = [(name, ranks, stage) for name in RULES for ranks in (2, 3) for stage in range(4)]
PAPERS = {"FlashAdamW": authors.OTHERS["flashadamw"], "Lion": authors.OTHERS["lion"]}
QUICK = {("FlashAdamW", 2, 2), ("Lion", 2, 3)}


def alone(name, ranks, kind):
    """One process by an optimizer -> names, weights before and after, and their states."""
    weights = [torch.nn.Parameter(p) for p in table.weights(SHAPES, torch.float32)]
    spared = {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0}
    optimizer = kind([{"params": [p for p in weights if p.dim() > 1]}, spared], **RULES[name])
    before = [p.detach().clone() for p in weights]
    every = [zip(*(gradients(step, r) for r in range(ranks)), strict=True) for step in range(STEPS)]
    plain.steps(optimizer, weights, [[sum(gs) / ranks for gs in step] for step in every])
    return before, [p.detach() for p in weights], [optimizer.state[p] for p in weights]


@pytest.mark.supports(
    "fp32, each optimizer against its authors' code", stage="stage", optimizer="name"
)
@pytest.mark.parametrize("name, ranks, stage", params(CASES, QUICK))
def test_every_code_and_scale_is_that_of_one_process(name, ranks, stage):
    before, _, states = alone(name, ranks, getattr(ds_ext, name))
    _, exact, _ = alone(name, ranks, PAPERS[name])
    pieces = 0
    for rank in worlds.run(ranks, train, name, stage):
        for i, state in enumerate(states):
            old, new, paper = before[i], rank["after"][f"weights.{i}"], exact[i]
            assert (new - paper).norm() <= 1e-6 * (paper - old).norm()
            kept = rank["state"][f"weights.{i}"]
            for moment in kept.keys() - {"step"}:
                for key, found in kept[moment].items():
                    part = slice(found["start"], found["start"] + len(found["values"]))
                    assert found["values"].equal(state[moment][key].flatten()[part])
                    pieces += len(found["values"])
    assert pieces >= sum(p.numel() for p in exact)


BITS = [
    (n, stage, way)
    for n in (1, 2, 3)
    for stage in range(4)
    for way in ("stochastic", "nearest", "master")
] + [(2, 1, "master24"), (3, 3, "master24")]
BITS += [(n, "fsdp2", way) for n in (2, 3) for way in ("stochastic", "nearest", "master")]
QUICK_BITS = [(2, 1, "nearest"), (2, 2, "stochastic"), (3, 3, "master24")]


@pytest.mark.supports("bf16 weights", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize("ranks, stage, weight_update", params(BITS, QUICK_BITS))
def test_bf16_weights_have_the_same_bits_on_any_number_of_ranks(ranks, stage, weight_update):
    got = worlds.once(ranks, bits, stage, weight_update)[0]
    for n, p in bits_reference(weight_update).items():
        assert p.dtype == torch.bfloat16 and torch.equal(got[n], p), n
