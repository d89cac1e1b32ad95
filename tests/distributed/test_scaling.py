"""fp16 on real ranks: overflows leave no trace but in scale and counters; torch autocast. Bad
gradients of the optimizers that step matrices one by one."""

import functools
import itertools
from dataclasses import astuple, dataclass
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

import ds_ext
from tests import worlds
from tests.common import by_role, engines, models
from tests.common.choose import pairs, params
from tests.common.hypers import TRAINED
from tests.common.ranks import whole
from tests.common.updates import check_each
from tests.tools.support import of

STEPS = 8
PLANTED = (2, 5)  # steps with an overflow on the last rank


@dataclass(frozen=True)
class Scaled:
    """fp16 training; ``planted``: batches that overflow, else those steps are left out."""

    stage: int
    policy: str = "fused"
    max_norm: float = 0.0
    static: float = 0.0  # 0: dynamic
    planted: bool = True
    how: str = "engine"
    rule: str = "lomo"


make = functools.partial(models.layers, 6, 16, 4, seed=2)


def loss_of(model: nn.Module, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return model(x).float().square().mean() * factor


def _runs() -> dict[str, Scaled]:
    made = {"scale": Scaled(3, "fused", 0.1, 64.0, how="scale")}
    ways = [(stage, policy, 0.1) for stage in (0, 2, 3) for policy in ("fused", "sharded")]
    # Without clipping, fused skips what overflows: here that is every parameter.
    for stage, policy, norm in [*ways, (1, "sharded", 0.0), (2, "fused", 0.0)]:
        for static, planted in itertools.product((0.0, 64.0), (True, False)):
            name = f"stage{stage}-{policy}-{norm}-{static or 'dynamic'}-{planted}"
            made[name] = Scaled(stage, policy, norm, static, planted)
    for stage, static, planted in itertools.product(range(4), (0.0, 64.0), (True, False)):
        name = f"muon-stage{stage}-{static or 'dynamic'}-{planted}"
        made[name] = Scaled(stage, "sharded", 0.1, static, planted, rule="muon")
    return made


RUNS = _runs()


def start(run: Scaled, model: nn.Module):
    fp16 = {"enabled": True, "loss_scale": run.static, "initial_scale_power": 8, "hysteresis": 1}
    more = {
        "gradient_clipping": run.max_norm,
        "fp16": fp16 | {"loss_scale_window": 2, "min_loss_scale": 1},
        "zero": {"stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.1}},
    }
    optimizer = by_role.made(
        run.rule, model, {"lr": 0.1, "weight_update": "master", "ema_decay": 0.9}
    )
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        return engines.start(model, optimizer, run.stage, run.policy, **more)


def train(run: Scaled) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make()
    engine = start(run, model)
    scales, skipped, rates = [], [], []
    for step in range(STEPS):
        if step in PLANTED and not run.planted:
            continue
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 6, generator=generator).half()
        factor = 1e8 if step in PLANTED and rank == world - 1 else 1.0
        loss = loss_of(engine, x, factor)
        scales.append(engine.optimizer.loss_scale)
        if run.how == "scale":
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
        engine.step()
        skipped.append(engine.skipped_steps)
        rates.append(engine.get_lr()[0])
    get = deepspeed.utils.safe_get_full_optimizer_state
    averages = {f"average of {n}": get(p, "ema") for n, p in engine.module.named_parameters()}
    return {
        "after": {n: p.float() for n, p in whole(model).items()} | averages,
        "scales": scales,
        "skipped": skipped,
        "rates": rates,
        "norm": engine.get_global_grad_norm(),
        "parameters": engine.optimizer.fused.skipped,
        "steps": {engine.param_names[p]: s["step"] for p, s in engine.optimizer.state.items()},
    }


def unscaled() -> None:
    model = make()
    engine = start(Scaled(2, static=64.0), model)
    before = whole(model)
    with pytest.raises(RuntimeError, match=r"(?s)(?=.*engine.backward\(loss\)).*current scale 64"):
        loss_of(engine, torch.randn(4, 6).half()).backward()
    assert all(torch.equal(p, before[n]) for n, p in whole(model).items())


def autocast_hypers(rule: str) -> dict[str, Any]:
    return {"lr": 0.01} | TRAINED.own.get(rule, {})


def autocast_loss(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return loss_of(model, engines.rows(number, rank, 4, 6))


def under_autocast(stage: int, dtype: str, rule: str, persistent: int = 0, **more: Any) -> Any:
    model = make()
    optimizer = by_role.made(rule, model, autocast_hypers(rule))
    more["torch_autocast"] = {"enabled": True, "dtype": dtype}
    more["zero"] = {"stage3_param_persistence_threshold": persistent}
    return engines.start(model, optimizer, stage, **more)


def autocast(stage: int, dtype: str, rule: str) -> dict[str, Any]:
    engine = under_autocast(stage, dtype, rule, gradient_clipping=0.5)
    model, optimizer = engine.module, engine.optimizer
    found = engines.trained(engine, autocast_loss, STEPS)
    found["dtypes"] = {str(p.dtype) for p in found["after"].values()}
    found["comm"] = {optimizer._comm_dtype(p) for p in model.parameters()}
    return found | {"scale": optimizer.loss_scale, "told": by_role.told(optimizer, model)}


def gathered_under_autocast(evaluated: bool) -> list[str]:
    """The weights that ``GatheredParameters`` reads or writes back otherwise than it should.

    They stay gathered after a forward pass without gradients, or because they are persistent.
    """
    engine = under_autocast(3, "float16", "adalomo", 0 if evaluated else 10**5)
    engines.train(engine, autocast_loss, 2)
    if evaluated:
        with torch.no_grad():
            autocast_loss(engine, 2, dist.get_rank())
    params = dict(engine.module.named_parameters())
    assert {p.ds_status for p in params.values()} == {ZeroParamStatus.AVAILABLE}
    before = {n: p.ds_tensor.clone() for n, p in params.items()}
    reads = []
    for rank in (0, None):
        with deepspeed.zero.GatheredParameters(params.values(), modifier_rank=rank):
            reads.append({n: p.detach().clone() for n, p in params.items()})
    wrong = [n for n, p in params.items() if not torch.equal(p.ds_tensor, before[n])]
    return wrong + [n for n in params if not torch.equal(reads[0][n], reads[1][n])]


def autocast_reference(
    world: int, dtype: torch.dtype, rule: str, told: by_role.Told
) -> engines.Alone:
    model = make()
    named = dict(model.named_parameters())
    optimizer = by_role.as_told(rule, autocast_hypers(rule), told, named)

    def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return autocast_loss(model, step, rank)

    return engines.alone(model, optimizer, loss_of, STEPS, world, 0.5)


RANKS = (1, 2, 3)
ON_THREE = "-64"  # what is run on three ranks: those with a static loss scale
COMPARED = [name for name, run in RUNS.items() if run.planted and run.how == "engine"]
ALL = [(n, name) for n in RANKS for name in COMPARED if n < 3 or ON_THREE in name]
ALL = [(n, name) for n, name in ALL if n == 2 or RUNS[name].rule == "lomo"]
# Static and dynamic scales, both policies.
QUICK = [(2, "stage1-sharded-0.0-dynamic-True"), (2, "stage2-fused-0.0-64.0-True")]
QUICK += [(2, f"stage{at}-True") for at in ("3-sharded-0.1-dynamic", "3-fused-0.1-64.0")]
QUICK += [(2, "stage0-fused-0.1-dynamic-True")]
ALL = pairs(ALL, lambda case: (case[0], *astuple(RUNS[case[1]])), QUICK)


def results_of(ranks, name):
    return worlds.once(ranks, train, RUNS[name])[0]


@pytest.mark.supports(
    lambda name: f"fp16, {'static' if RUNS[name].static else 'dynamic'} loss scale", **of(RUNS)
)
@pytest.mark.parametrize("ranks, name", params(ALL, QUICK))
def test_a_step_that_overflows_is_as_if_it_had_not_been(ranks, name):
    got, without = results_of(ranks, name), results_of(ranks, name.replace("True", "False"))
    start = make().state_dict()
    for n, p in got["after"].items():
        assert p.shape == start[n.removeprefix("average of ")].shape and p.isfinite().all()
        if RUNS[name].static:
            assert torch.equal(p, without["after"][n])
        else:  # another scale rounds the smallest gradients otherwise
            assert (p - without["after"][n]).norm() <= 1e-3 * p.norm()
    assert set(got["steps"].values()) == {STEPS - len(PLANTED)}
    assert [r for i, r in enumerate(got["rates"]) if i not in PLANTED] == without["rates"]
    assert got["skipped"] == [sum(step >= at for at in PLANTED) for step in range(STEPS)]
    assert without["skipped"] == [0] * (STEPS - len(PLANTED))
    assert got["parameters"] == len(start) * len(PLANTED)
    if RUNS[name].static:
        assert got["scales"] == [64.0] * STEPS
    else:  # halved by each overflow, doubled after two steps without
        assert got["scales"] == [256] * 3 + [128] * 3 + [64] * 2
        assert without["scales"][3:] == [512, 512, 1024]


@pytest.mark.slow
def test_all_ways_end_at_the_same_weights():
    """Policy, stage and the way backward is called change nothing where gradients are clipped."""
    first = results_of(2, "stage2-fused-0.1-64.0-True")
    for name, how in RUNS.items():
        if how.rule == "lomo" and how.max_norm and how.static and how.planted:
            for n, p in results_of(2, name)["after"].items():
                assert (p - first["after"][n]).norm() <= 1e-3 * p.norm(), (name, n)
            assert results_of(2, name)["norm"] > how.max_norm


@pytest.mark.parametrize("ranks", params(RANKS, (2,)))
def test_a_loss_that_is_not_scaled_is_an_error_before_anything_moves(ranks):
    worlds.run(ranks, unscaled)


AUTOCAST = [(n, stage, "adalomo") for n in (1, 2) for stage in range(4)] + [(3, 3, "adalomo")]
AUTOCAST += [(2, stage, "muon") for stage in range(4)]
QUICK_AUTOCAST = [(2, stage, "adalomo") for stage in (1, 3)]


@pytest.mark.supports("`torch_autocast`", stage="stage", optimizer="rule")
@pytest.mark.parametrize("dtype, error", [("bfloat16", 1e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("ranks, stage, rule", params(AUTOCAST, QUICK_AUTOCAST))
def test_autocast_follows_torch_in_one_process(ranks, stage, rule, dtype, error):
    got = worlds.once(ranks, autocast, stage, dtype, rule)[0]
    assert got["dtypes"] == {"torch.float32"} and got["comm"] == {getattr(torch, dtype)}
    assert got["scale"] == (2**16 if dtype == "float16" else 1)
    alone = autocast_reference(ranks, getattr(torch, dtype), rule, got["told"])
    # gradients are rounded once more to be sent
    check_each(got["after"], alone.after, got["before"], close=error)


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("ranks", params(RANKS, (2,)))
def test_weights_gathered_under_autocast_are_not_rounded(ranks, evaluated):
    assert worlds.once(ranks, gathered_under_autocast, evaluated) == [[]] * ranks


LOW_RANK = {"rank": 4, "update_proj_gap": 2}
HYPERS: dict[str, dict[str, Any]] = {"GaLoreAdamW": LOW_RANK, "APOLLO": LOW_RANK, "Muon": {}}
BAD = (0, 3)  # the steps with a bad gradient, as GaLore's first basis and its next one are due
BAD_STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(16, 24, bias=False), nn.LayerNorm(24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor, is_bad: bool = False) -> Tensor:
        x = self.up(x)
        if is_bad:
            x.register_hook(lambda grad: grad * torch.nan)
        return self.down(self.norm(x.tanh())).square().mean()


def trained(
    name: str, stage: int, policy: str, clip: float, accumulation: int, is_skipped: bool
) -> tuple[dict[str, Tensor], int]:
    """The weights, and the number of skipped steps, after steps with bad ones or without them.

    Only one micro-batch of one rank has a bad gradient, of one matrix.
    """
    torch.manual_seed(0)
    model, rank = Model(), dist.get_rank()
    optimizer = getattr(ds_ext, name).for_model(model, lr=0.01, **HYPERS[name])
    more = {"gradient_accumulation_steps": accumulation, "gradient_clipping": clip}
    engine = engines.start(model, optimizer, stage, policy, **more)
    for step in range(BAD_STEPS):
        if is_skipped and step in BAD:
            continue
        for number in range(accumulation):
            is_bad = step in BAD and (number, rank) == (0, 1)
            x = engines.rows(step * accumulation + number, rank, 4, 16)
            engine.backward(engine(x, is_bad))
            engine.step()
    return whole(model), engine.optimizer.fused.skipped_steps


HOW = [("", 1.0, 1), ("", 1.0, 2), ("sharded", 0.0, 2)]
BAD_CASES = [(name, stage) for name in HYPERS for stage in range(4)]
QUICK_BAD = [("GaLoreAdamW", 3), ("Muon", 2)]
QUICK_SKIPPED = [(*case, how) for case, how in zip(QUICK_BAD, HOW[1:3], strict=True)]
SKIPPED = pairs(
    [(*case, how) for case in BAD_CASES for how in HOW],
    lambda case: case,
    QUICK_SKIPPED,
)


@pytest.mark.parametrize("name, stage, how", params(SKIPPED, QUICK_SKIPPED))
def test_a_step_skipped_for_one_matrix_leaves_no_trace(name, stage, how):
    runs = worlds.run(2, trained, name, stage, *how, False)
    for (got, skipped), (without, none) in zip(
        runs, worlds.run(2, trained, name, stage, *how, True), strict=True
    ):
        assert (skipped, none) == (len(BAD), 0)
        assert all(torch.equal(p, without[n]) for n, p in got.items())


@pytest.mark.parametrize("name, stage", params(BAD_CASES, QUICK_BAD))
@worlds.on(2)
def test_without_clipping_only_the_bad_matrix_is_skipped(name, stage):
    torch.manual_seed(0)
    model = Model()
    optimizer = getattr(ds_ext, name).for_model(model, lr=0.01, **HYPERS[name])
    engine = engines.start(model, optimizer, stage)
    before = whole(model)
    engine.backward(engine(engines.rows(0, dist.get_rank(), 4, 16), dist.get_rank() == 1))
    engine.step()
    for n, p in whole(model).items():
        assert p.isfinite().all() and torch.equal(p, before[n]) == (n == "up.weight"), n
    assert engine.optimizer.fused.skipped == 1
