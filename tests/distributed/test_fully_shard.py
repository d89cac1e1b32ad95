"""FSDP2 on real ranks, against the authors' optimizers in one process with whole gradients; its own
options, and meshes of two dimensions."""

import functools
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
from tests.common import engines, models, updates
from tests.common.authors import INDEPENDENT, ordinary
from tests.common.by_role import MATRICES
from tests.common.choose import params
from tests.common.hypers import CLOSE, FOR_ALL, TRAINED
from tests.common.states import same
from tests.common.updates import check_each, error
from tests.distributed import fully_shard_jobs, test_storing, training_jobs
from tests.distributed.fully_shard_jobs import UNITS, local, shard, whole, zoo
from tests.distributed.training_jobs import STEPS, Training
from tests.distributed.zero_jobs import HYPERS


def case(rule: str, how: str = "fused", **more: Any) -> Training:
    """A run by a policy, or by ``optimizer.step()`` alone if it is "plain"."""
    given = {"how": how} if how == "plain" else {"policy": how}
    return Training(rule, None, own=HYPERS[rule], bucket=300, dropout=0.0, **given | more)


CASES = {
    f"{rule}-{how}": case(rule, how) for rule in (*FOR_ALL, *MATRICES) for how in ("fused", "plain")
}
CASES["adalomo-sharded"] = case("adalomo", "sharded")
for kind in ("reentrant", "non-reentrant"):
    CASES[f"came-{kind}"] = case("came", checkpointing=kind)
    CASES[f"lomo-{kind}"] = case("lomo", "sharded", checkpointing=kind)
    CASES[f"muon-{kind}"] = case("muon", checkpointing=kind)
ALL = [(2, name) for name in CASES]
ALL += [(3, "adalomo-fused"), (3, "came-plain"), (3, "adalomo-sharded")]
# What `make test` runs: each policy, and rules of several kinds.
QUICK = {(2, name) for name in ("adamw-plain", "lomo-fused", "adalomo-sharded")}
QUICK |= {(2, name) for name in ("came-reentrant", "muon-fused")}
AUTHORS = "fp32, each optimizer against its authors' code"


def shown(name: str) -> list[str]:
    rule, kind = CASES[name].rule, CASES[name].checkpointing
    own = [AUTHORS] if rule in INDEPENDENT or rule in MATRICES else []
    if kind is not None:
        own.append(f"{kind} activation checkpointing")
    return [*own, "tied, shared, unused weights; 0 to 4 dimensions"]


UNTOUCHED = {"unused.weight", "unused.bias", "frozen.weight", "frozen.bias"}


@pytest.mark.supports(shown, stage="fsdp2", optimizer=lambda name: CASES[name].rule)
@pytest.mark.parametrize("ranks, name", params(ALL, QUICK.__contains__))
def test_equals_the_authors(ranks, name):
    case = CASES[name]
    got = worlds.once(ranks, fully_shard_jobs.train, case)[0]
    alone = training_jobs.alone(case, ranks, got, fully_shard_jobs.zoo())
    check(got, alone.after, CLOSE.get(case.rule, 1e-5))
    if case.how != "plain":
        assert got["norms"] == pytest.approx(alone.norms, rel=1e-4)
    in_backward = case.how != "plain" and case.policy == "fused"
    assert got["moved in backward"] == [in_backward] * STEPS
    assert got["identical"]
    halfway = {n: s for n, s in got["steps"].items() if s not in (0, STEPS)}
    assert halfway == {"odd.weight": STEPS // 2}


def check(got, expected, close, untouched=UNTOUCHED):
    """Compares weights with those of one process, which moves all but ``untouched``."""
    updates.check(got["after"], expected, got["before"], STEPS, close)
    still = {
        n for n, p in expected.items() if torch.equal(p.view_as(got["before"][n]), got["before"][n])
    }
    assert still == untouched


# How gradients are clipped and kept. Those that FSDP2 keeps over micro-batches are summed over the
# ranks with the last one; the others with each.
BY_STEP: dict[str, dict[str, Any]] = {
    "fused": {},
    "clipped": {"max_norm": 0.3},
    "sharded": {"max_norm": 0.3, "policy": "sharded"},
    "by value": {"clip_value": 0.003},
}
ACCUMULATED = [(name, by_fsdp, 2) for name in BY_STEP for by_fsdp in (True, False)]
# gradients are used up by the backward pass that brings them
ACCUMULATED = [c for c in ACCUMULATED if c[1] or c[0] == "sharded"]
ACCUMULATED += [(name, False, 1) for name in BY_STEP]
SEGMENTS = [(*c, None) for c in ACCUMULATED]
SEGMENTS += [("clipped", False, 1, "reentrant"), ("fused", True, 2, "reentrant")]
SEGMENTS += [("sharded", False, 2, "reentrant"), ("clipped", False, 1, "non-reentrant")]
SEGMENTS = [(*c, "lomo") for c in SEGMENTS] + [(*c, None, "muon") for c in ACCUMULATED]


def means(name: str, micro: int, checkpointing: str | None) -> list[str]:
    """What a way to clip, over so many micro-batches, is called."""
    if checkpointing is not None:
        return [f"{checkpointing} activation checkpointing"]
    said = {"clipped": 'clipping by norm, `"fused"`'}
    said |= {"sharded": 'clipping by norm, `"sharded"`', "by value": "clipping by value"}
    if micro == 1:
        return [said[name]] if name in said else []
    return ["gradient accumulation" + (" with clipping" if name in ("clipped", "sharded") else "")]


@pytest.mark.supports(means, stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize(
    "name, by_fsdp, micro, checkpointing, rule",
    params(
        SEGMENTS, {("clipped", False, 1, "reentrant", "lomo"), ("clipped", True, 2, None, "muon")}
    ),
)
def test_micro_batches_are_one_step_and_clipped_exactly(name, by_fsdp, micro, checkpointing, rule):
    run = Training(
        *(rule, None), **BY_STEP[name], accumulation=micro, checkpointing=checkpointing,
        own={"lr": 0.05, "weight_decay": 0.0}, bucket=300, dropout=0.0
    )  # fmt: skip
    got = worlds.run(2, fully_shard_jobs.train, run, True, by_fsdp)[0]
    _, expected, norms = training_jobs.alone(run, 2, got, fully_shard_jobs.apart())
    close = CLOSE.get(rule, 1e-5)
    check(got, expected, close, UNTOUCHED | {"offsets"})
    assert got["norms"] == pytest.approx(norms, rel=close) and got["identical"]
    assert sum(norm > 0.3 for norm in norms) > 1 and not got["held twice"]
    # what FSDP2 has kept cannot be measured first, so it waits for the step to be clipped
    waits = name == "sharded" or (name == "clipped" and micro > 1)
    assert got["moved in backward"] == ([False] * (micro - 1) + [not waits]) * STEPS


@worlds.on(2)
def test_what_comes_too_late_is_refused_before_a_weight_moves():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(zoo())
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.05)
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=300)
    held = local(model)
    model.set_requires_gradient_sync(False)
    model(models.batch(0, world)[rank]).backward()
    with pytest.raises(RuntimeError, match=r"set_requires_gradient_sync\(True\)"):
        optimizer.step()
    assert torch.equal(held, local(model))


# Kept whole, by element, in groups of 32; a rate by the step count, which torch cannot set to 0.
RESUMED = {"flashadamw": {"lr": 0.01, "ema_decay": 0.9}, "adafactor": {"beta1": 0.9}}
RESUMED["muon"] = {"lr": 0.01, "ns_dtype": "fp32"}
KEPT = [("flashadamw", True), ("adafactor", False), ("muon", True)]


@pytest.mark.supports("`torch.distributed.checkpoint`", stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize("rule, fused", params(KEPT, KEPT[1:2]))
def test_a_run_goes_on_on_other_ranks_from_torchs_checkpoints(rule, fused, tmp_path):
    """2 -> 3 -> 1 ranks, against 2 that are not broken off."""
    hypers = RESUMED[rule]
    one, two = str(tmp_path / "whole"), str(tmp_path / "broken")
    run = functools.partial(worlds.run, 2, fully_shard_jobs.resume, rule, hypers, fused)
    expected = run(one, 0, 3)[0]
    assert expected["spread"]
    first = run(two, 0, 1)[0]
    second = worlds.run(3, fully_shard_jobs.resume, rule, hypers, fused, two, 1, 2)[0]
    got = worlds.run(1, fully_shard_jobs.resume, rule, hypers, fused, two, 2, 3)[0]
    for run_before, run_after in ((first, second), (second, got)):
        assert len(run_before["saved"]) > 20
        assert same(run_before["saved"], run_after["loaded"])
    # where sums are added up in another order, codes of 8 bits jump, and Muon amplifies the change
    close = {"flashadamw": 0.02, "muon": 1e-4}.get(rule, 1e-5)
    assert updates.error(got["after"], expected["after"], expected["before"]) <= close


@pytest.mark.parametrize("every", params([1, 20], [20]))
@worlds.on(2)
def test_a_function_of_a_state_dict_that_fails_on_one_rank_fails_on_all(every):
    model = shard(zoo())
    optimizer = ds_ext.FlashAdamW.for_model(model)
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=300)
    model(models.batch(0, 2)[dist.get_rank()]).backward()
    optimizer.step()
    load = functools.partial(optimizer.load_state_dict, optimizer.state_dict())
    actions = {"_local_state_dict": optimizer.state_dict, "_load_state_dict": load}
    test_storing.failing_one_by_one(actions, 50, every)


@worlds.on(2)
def test_a_rule_for_matrices_finds_the_experts_of_a_model():
    model = nn.Module()
    model.num_experts, model.weight = 4, nn.Parameter(torch.ones(4, 6, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    (state,) = ds_ext.Muon.for_model(model).state.values()
    assert list(state["experts"]) == [*"0123"]


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


@worlds.on(2)
def test_fully_shard_after_fuse_into_backward_is_named():
    model = zoo()
    optimizer = ds_ext.AdamW(model.parameters(), **ADAMW)
    ds_ext.fuse_into_backward(model, optimizer)
    shard(model)
    model(models.batch(0, 2)[dist.get_rank()], step=0).backward()
    with pytest.raises(RuntimeError, match="Call fully_shard first"):
        optimizer.step()


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
MESHED = [("hybrid", "came", 0.0), ("tensor", "adalomo", 0.2)]
MEANT = {"hybrid": "HSDP", "tensor": "tensor parallelism (torch's)"}


@pytest.mark.supports(lambda kind: MEANT[kind], stage="fsdp2", optimizer="rule")
@pytest.mark.parametrize("kind, rule, clip", params(MESHED, MESHED[:1]))
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
