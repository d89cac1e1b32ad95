"""Moments of 8 bits and bf16 weights on real ranks, by gradients whose sums are exact.

Elsewhere sums differ in their last bits, which makes some codes jump. Here none may: what is left
are the last bits of weights, which ranks that have parts of groups compute in another way.
"""

import pytest
import torch

import ds_ext
from tests import worlds
from tests.common import authors, table
from tests.common.choose import params
from tests.distributed import exact_sums_jobs
from tests.distributed.exact_sums_jobs import RULES, SHAPES, STEPS

CASES = [(name, ranks, stage) for name in RULES for ranks in (2, 3) for stage in range(4)]
PAPERS = {"FlashAdamW": authors.OTHERS["flashadamw"], "Lion": authors.OTHERS["lion"]}
QUICK = {("FlashAdamW", 3, 3), ("FlashAdamW", 2, 2), ("Lion", 3, 1)}


def alone(name, ranks, kind):
    """One process by an optimizer -> names, weights before and after, and their states."""
    weights = [torch.nn.Parameter(p) for p in table.weights(SHAPES, torch.float32)]
    spared = [p for p in weights if p.dim() < 2]
    groups = [
        {"params": [p for p in weights if p.dim() > 1]},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **RULES[name])
    before = [p.detach().clone() for p in weights]
    for step in range(STEPS):
        every = [exact_sums_jobs.gradients(step, rank) for rank in range(ranks)]
        for p, *gs in zip(weights, *every, strict=True):
            p.grad = sum(gs) / ranks
        optimizer.step()
    return before, [p.detach() for p in weights], [optimizer.state[p] for p in weights]


@pytest.mark.supports(
    "fp32, each optimizer against its authors' code", stage="stage", optimizer="name"
)
@pytest.mark.parametrize("name, ranks, stage", params(CASES, QUICK))
def test_every_code_and_scale_is_that_of_one_process(name, ranks, stage):
    before, _, states = alone(name, ranks, getattr(ds_ext, name))
    _, exact, _ = alone(name, ranks, PAPERS[name])
    pieces = 0
    for rank in worlds.run(ranks, exact_sums_jobs.train, name, stage):
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
QUICK_BITS = [(2, 1, "nearest"), (2, 2, "stochastic"), (3, 1, "master"), (3, 3, "stochastic")]
QUICK_BITS += [(3, 3, "master24")]


@pytest.mark.supports("bf16 weights", stage="stage", optimizer="LOMO")
@pytest.mark.parametrize("ranks, stage, weight_update", params(BITS, QUICK_BITS))
def test_bf16_weights_have_the_same_bits_on_any_number_of_ranks(ranks, stage, weight_update):
    got = worlds.once(ranks, exact_sums_jobs.bits, stage, weight_update)[0]
    for n, p in exact_sums_jobs.bits_reference(weight_update).items():
        assert p.dtype == torch.bfloat16 and torch.equal(got[n], p), n
