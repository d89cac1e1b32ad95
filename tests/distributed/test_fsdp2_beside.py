"""FSDP2's own options, meshes of two dimensions and bf16, on real ranks."""

import pytest
import torch

from ds_ext.optimizer import OPTIMIZERS
from tests import worlds
from tests.common import table
from tests.common.authors import ordinary
from tests.common.choose import params
from tests.common.hypers import TRAINED
from tests.common.plain import mean_step
from tests.common.states import same
from tests.common.updates import check_each
from tests.distributed import fsdp2_beside_jobs
from tests.distributed.fsdp2_beside_jobs import STEPS, WAYS, differs

MEANS = {"bf16 compute": "`MixedPrecisionPolicy`", "bf16 sums": "`MixedPrecisionPolicy`"}
MEANS |= {"left gathered": "`reshard_after_forward`", "cut for fewer": "`reshard_after_forward`"}
MEANS |= {"offloaded": "`CPUOffloadPolicy`", "compiled": "`torch.compile`"}


@pytest.mark.supports(lambda way: MEANS[way], stage="fsdp2", optimizer="AdamW")
@pytest.mark.parametrize("way", params(WAYS, lambda way: way not in ("cut for fewer", "compiled")))
def test_adamw_is_torchs_whatever_fully_shard_is_told(way):
    for off, in_backward in worlds.run(4 if way == "cut for fewer" else 2, differs, way):
        assert off <= 1e-5
        assert in_backward


# One job for each mesh: torch hands out meshes of jobs before, whose groups are destroyed.
CASES = [("hybrid", "came", "fused"), ("tensor", "adalomo", "clipped")]
MEANT = {"hybrid": "HSDP", "tensor": "tensor parallelism (torch's)"}


@pytest.mark.supports(lambda kind: MEANT[kind], stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize("kind, rule, how", CASES)
def test_meshes_of_two_dimensions_equal_one_process(kind, rule, how):
    hypers = TRAINED[rule] | {"weight_decay": 0.1}
    first, *others = worlds.run(4, fsdp2_beside_jobs.spread, kind, rule, hypers, how)
    model, norms = fsdp2_beside_jobs.Ladder(), []
    hypers = dict(hypers)
    group = {"params": list(model.parameters()), "weight_decay": hypers.pop("weight_decay")}
    optimizer = ordinary(rule, [group], hypers)
    for step in range(STEPS):
        losses = [model.loss(step, part) for part in range(4 if kind == "hybrid" else 2)]
        norms.append(mean_step(optimizer, losses, 0.2 if how == "clipped" else 0.0))
    expected = dict(model.named_parameters())
    check_each(first["after"], expected, first["before"], STEPS)
    assert not any(torch.equal(p, first["before"][n]) for n, p in expected.items())
    assert all(same(first["after"], got["after"]) for got in others)
    if how != "plain":
        assert first["norms"] == pytest.approx(norms, rel=1e-5) and max(norms) > 0.2


@pytest.mark.supports("bf16 weights", stage="fsdp2", optimizer="LOMO")
@pytest.mark.parametrize("ranks", params([2, 3], [3]))
def test_bf16_weights_are_rounded_alike_on_any_number_of_ranks(ranks):
    shapes = [(7, 5), (16, 12), (3,), (4, 3, 5), (1, 9)]
    grads, weights = table.gradients(3, shapes), table.weights(shapes)
    assert OPTIMIZERS["lomo"].hypers().weight_update == "stochastic"
    alone = fsdp2_beside_jobs.rounded(grads, weights)
    for got in worlds.run(ranks, fsdp2_beside_jobs.rounded, grads, weights):
        assert all(map(torch.equal, got, alone))
    assert not any(torch.equal(p, w.bfloat16()) for p, w in zip(alone, weights, strict=True))
