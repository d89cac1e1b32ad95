"""FSDP2's own options, and meshes of two dimensions, on real ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from tests import worlds
from tests.common import engines, models
from tests.common.authors import ordinary
from tests.common.choose import params
from tests.common.hypers import TRAINED
from tests.common.states import same
from tests.common.updates import check_each, error
from tests.distributed.fully_shard_jobs import UNITS, local, shard, whole, zoo

STEPS = 4
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
_BF16 = torch.bfloat16
# What is given to fully_shard.
WAYS: dict[str, dict[str, Any]] = {
    "bf16 compute": {"mp_policy": MixedPrecisionPolicy(_BF16, torch.float32)},
    "bf16 sums": {"mp_policy": MixedPrecisionPolicy(_BF16, _BF16)},
    "left gathered": {"reshard_after_forward": False},
    "cut for fewer": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "compiled": {},
}


def differs(way: str) -> None:
    """The updates of two optimizers are the same; weights move in the backward pass of ours."""
    rank, world, moved, ends = dist.get_rank(), dist.get_world_size(), [], []
    for kind in (ds_ext.AdamW, torch.optim.AdamW):
        model = shard(zoo(), **WAYS[way])
        if way == "compiled":
            for name in UNITS:
                getattr(model, name).compile(backend="aot_eager")
        optimizer = kind(model.parameters(), **ADAMW)
        if kind is ds_ext.AdamW:
            ds_ext.fuse_into_backward(model, optimizer, bucket_size=300)
        before = whole(model)
        for step in range(STEPS):
            held = local(model)
            model(models.batch(step, world)[rank], step=step).backward()
            moved.append(not torch.equal(held, local(model)))
            optimizer.step()
            optimizer.zero_grad()
        ends.append(whole(model))
    ours, torchs = ends
    assert error(ours, torchs, before) <= 1e-5
    assert moved == [True] * STEPS + [False] * STEPS


def cut_later() -> str:
    """The error of a step if fully_shard is called after fuse_into_backward."""
    model = zoo()
    optimizer = ds_ext.AdamW(model.parameters(), **ADAMW)
    ds_ext.fuse_into_backward(model, optimizer)
    shard(model)
    model(models.batch(0, 2)[dist.get_rank()], step=0).backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_fully_shard_after_fuse_into_backward_is_named():
    for text in worlds.run(2, cut_later):
        assert "Call fully_shard first" in text


class Ladder(nn.Module):
    """Matrices that tensor parallelism divides by rows and by columns, and some that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.norm = nn.LayerNorm(6)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.second(torch.tanh(self.first(self.norm(x)))))

    def loss(self, step: int, part: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + part)
        return (self(torch.randn(7, 6, generator=generator)) - 1).square().mean()


def divided(mesh: DeviceMesh) -> Ladder:
    """The model by tensor parallelism, and then by ``fully_shard``."""
    model, data = Ladder(), mesh["data"]
    parallelize_module(
        model, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )
    for name in ("first", "second"):
        fully_shard(getattr(model, name), mesh=data)
    return fully_shard(model, mesh=data)


def hybrid(mesh: DeviceMesh) -> Ladder:
    """The model cut over one dimension of a mesh, and copied over the other."""
    model = Ladder()
    for name in ("first", "second"):
        fully_shard(getattr(model, name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


MESHES: dict[str, tuple[tuple[str, str], Callable[[DeviceMesh], Ladder]]] = {
    "hybrid": (("copy", "part"), hybrid),
    "tensor": (("data", "tensor"), divided),
}


def spread(kind: str, rule: str, hypers: dict[str, Any], clip: float) -> dict[str, Any]:
    """Weights before and after, and norms, of four ranks on a mesh of two dimensions."""
    names, make = MESHES[kind]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = make(mesh)
    part = dist.get_rank() if kind == "hybrid" else mesh["data"].get_local_rank()
    optimizer = OPTIMIZERS[rule](model.parameters(), **hypers)
    engine = engines.Fused(model, optimizer, 1, bucket_size=20, max_grad_norm=clip)
    before = whole(model)
    norms = engines.train(engine, lambda engine, step, _: engine.module.loss(step, part), STEPS)
    return {"before": before, "after": whole(model), "norms": norms}


MEANS = {"bf16 compute": "`MixedPrecisionPolicy`", "bf16 sums": "`MixedPrecisionPolicy`"}
MEANS |= {"left gathered": "`reshard_after_forward`", "cut for fewer": "`reshard_after_forward`"}
MEANS |= {"offloaded": "`CPUOffloadPolicy`", "compiled": "`torch.compile`"}


@pytest.mark.supports(lambda way: MEANS[way], stage="fsdp2", optimizer="AdamW")
@pytest.mark.parametrize("way", params(WAYS, ["left gathered"]))
def test_adamw_is_torchs_whatever_fully_shard_is_told(way):
    worlds.run(4 if way == "cut for fewer" else 2, differs, way)


# One job for each mesh: torch hands out meshes of jobs before, whose groups are destroyed.
CASES = [("hybrid", "came", 0.0), ("tensor", "adalomo", 0.2)]
MEANT = {"hybrid": "HSDP", "tensor": "tensor parallelism (torch's)"}


@pytest.mark.supports(lambda kind: MEANT[kind], stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize("kind, rule, clip", params(CASES, CASES[:1]))
def test_meshes_of_two_dimensions_equal_one_process(kind, rule, clip):
    hypers = TRAINED[rule] | {"weight_decay": 0.1}
    first, *others = worlds.run(4, spread, kind, rule, hypers, clip)
    model = Ladder()
    hypers = dict(hypers)
    group = {"params": list(model.parameters()), "weight_decay": hypers.pop("weight_decay")}
    parts = 4 if kind == "hybrid" else 2
    optimizer = ordinary(rule, [group], hypers)
    _, expected, norms = engines.alone(model, optimizer, Ladder.loss, STEPS, parts, clip)
    check_each(first["after"], expected, first["before"], STEPS)
    assert not any(torch.equal(p, first["before"][n]) for n, p in expected.items())
    assert all(same(first["after"], got["after"]) for got in others)
    assert first["norms"] == pytest.approx(norms, rel=1e-5) and max(norms) > 0.2
