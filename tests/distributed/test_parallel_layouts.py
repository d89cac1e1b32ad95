"""Second forward passes, others' parameters and edited groups beside each layout.

Tensor parallelism, sequence parallelism, experts that ranks share out, and offload, each beside
torch's AdamW on the same model in one process.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from tests import worlds
from tests.common import engines, plain, updates
from tests.common.choose import pairs, params
from tests.common.ranks import shared_folder
from tests.common.states import same
from tests.distributed import (
    expert_parallel_jobs,
    mixtures,
    offload_jobs,
    pipelines_jobs,
    test_tensor_parallel,
)

HYPERS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}
Engine = Callable[..., deepspeed.DeepSpeedEngine]  # of a stage, and keys of the config


@dataclass(frozen=True)
class Special:
    """A way to lay out a model on two ranks, and the same model in one process."""

    engine: Engine
    loss: engines.Loss
    alone: Callable[[], nn.Module]
    loss_alone: engines.Loss
    world: int  # ranks whose ``loss_alone`` is averaged
    weights: Callable[[deepspeed.DeepSpeedEngine], dict[str, Tensor]]
    second: str = r"qkv|down"  # the names of the parameters of the second group
    taken_out: str = "out.weight"  # the name of a parameter of the first group
    later: str = "down.weight"  # the name of one of the second


def _shared_by_pairs(kind: str) -> Special:
    """Layers or sequences that two ranks share."""
    jobs = test_tensor_parallel

    def engine(stage: int, **more: Any) -> deepspeed.DeepSpeedEngine:
        more["optimizer"] = {"type": "ds_ext.adamw", "params": grouped(Special.second)}
        return jobs.start(jobs.Case(kind, "adamw", stage, more))

    def loss_alone(model: Any, number: int, rank: int) -> Tensor:
        return jobs.loss_of(model, kind, number, 0)

    loss, make = jobs.loss_here(kind), functools.partial(jobs.make, kind)
    return Special(engine, loss, make, loss_alone, 1, lambda e: jobs.weights(e)[0])


def _experts() -> Special:
    jobs = expert_parallel_jobs

    def engine(stage: int, gradient_clipping: float, **more: Any) -> deepspeed.DeepSpeedEngine:
        how = {"max_norm": gradient_clipping, "policy": "", "json": True}
        run = mixtures.Run("moe", "adamw", stage, ep=2, own=grouped(r"up|down"), **how)
        return jobs.start(run, stage, 2, **more)

    def alone() -> nn.Module:
        model = jobs.Whole()
        model.load_state_dict(jobs.values())
        return model

    def loss(model: Any, number: int, rank: int) -> Tensor:
        return jobs.loss_of(model, number + 1, rank)

    def weights(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in jobs.named(engine.module).items()}

    return Special(engine, loss, alone, loss, 2, weights, r"up|down", "wide.weight")


def _offloaded() -> Special:
    jobs = offload_jobs

    def engine(stage: int, **more: Any) -> deepspeed.DeepSpeedEngine:
        offload = jobs.BOTH if stage == 3 else jobs.STATE
        own = {"hypers": grouped("second"), "is_json": True}
        return jobs.start("adamw", stage, offload, own | more)

    def alone() -> nn.Module:
        torch.manual_seed(5)
        return jobs.Tower()

    def loss(model: Any, number: int, rank: int) -> Tensor:
        return model(engines.rows(number, rank, 3, 12).to(next(model.parameters()).device))

    names = "second", "first.weight", "second.weight"
    return Special(engine, loss, alone, loss, 2, jobs.weights, *names)


LAYOUTS: dict[str, Callable[[], Special]] = {
    "tensor parallelism": functools.partial(_shared_by_pairs, "fused"),
    "sequences": functools.partial(_shared_by_pairs, "sequences"),
    "experts": _experts,
    "offload": _offloaded,
}


def grouped(second: str) -> dict[str, Any]:
    """AdamW's hyper-parameters in a config with two groups of parameters."""
    return HYPERS | {"param_groups": [{"match": second, "lr": HYPERS["lr"]}]}


@contextlib.contextmanager
def laid_out(layout: str) -> Iterator[Special]:
    """A layout; what is offloaded lies on a pretended device otherwise."""
    around = offload_jobs.place(True) if layout == "offload" else contextlib.nullcontext()
    with around:
        yield LAYOUTS[layout]()


def torchs(model: nn.Module, second: str) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    first = [p for n, p in named if not re.search(second, n)]
    other = {"params": [p for n, p in named if re.search(second, n)], "name": second}
    return torch.optim.AdamW([{"params": first}, other], **HYPERS)


def error(after: dict[str, Tensor], alone: engines.Alone) -> float:
    """‖difference‖ / ‖update‖ of what this rank holds."""
    expected = {n: p for n, p in alone.after.items() if n in after}
    return updates.error({n: p.cpu() for n, p in after.items()}, expected, alone.before)


def edited(layout: str, stage: int, passes: int, max_norm: float) -> dict[str, Any]:
    """Edits of param groups between steps, as torch follows them.

    A loss is of two forward passes, and of a trained factor that is not the engine's.
    """
    with laid_out(layout) as special:
        more = {"gradient_accumulation_steps": passes, "gradient_clipping": max_norm}
        engine = special.engine(stage, **more)
        factor = nn.Parameter(torch.tensor(1.5, device=engine.device))
        wanted: list[Tensor] = []  # the factor's next gradient
        off, seen = [], []

        def twice(loss: engines.Loss, model: Any, number: int, rank: int) -> Tensor:
            return loss(model, 2 * number, rank) + 0.5 * loss(model, 2 * number + 1, rank)

        def look() -> None:
            if wanted:
                off.append(float((factor.grad - wanted[0]).abs() / wanted[0]))
            factor.grad = None

        def loss_of(model: Any, *of: int) -> Tensor:
            look()
            loss = twice(special.loss, model, *of)
            wanted[:] = [loss.detach() / passes]
            return loss * factor

        def noted(model: Any, optimizer: Any, step: int) -> None:
            seen.append(special.weights(engine))
            edit(special, model, optimizer, step)

        engines.train(engine, loss_of, STEPS, passes, noted)
        look()
        seen.append(special.weights(engine))
        alone = alone_by_torch(
            special, lambda *of: 1.5 * twice(special.loss_alone, *of), max_norm, passes
        )
        names = special.taken_out, special.later
        stayed = [[torch.equal(a[n], b[n]) for n in names] for a, b in pairwise(seen)]
        return {"error": error(seen[-1], alone), "off": max(off), "stayed": stayed}


def alone_by_torch(
    special: Special, loss: engines.Loss, *how: Any, start: dict[str, Tensor] | None = None
) -> engines.Alone:
    """The same edits and steps of torch's AdamW in one process, from the weights ``start``."""
    model = special.alone()
    model.load_state_dict(start or {}, strict=False)
    optimizer = torchs(model, special.second)
    edits = functools.partial(edit, special)
    return engines.alone(model, optimizer, loss, STEPS, special.world, *how, edit=edits)


def slow_down(optimizer: Any, param: Tensor | None, second: str) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def replace_group(optimizer: Any, param: Tensor | None, second: str) -> None:
    groups = optimizer.param_groups
    groups[:] = [{**g, "lr": 3 * g["lr"]} if g.get("name") == second else g for g in groups]


def take_out(optimizer: Any, param: Tensor | None, second: str) -> None:
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not param]


def add_group(optimizer: Any, param: Tensor | None, second: str) -> None:
    if param is not None:
        param.grad = None  # what came while it was in no group: torch would add to it
    optimizer.add_param_group({"params": [] if param is None else [param], "lr": 0.02})


def remove_group(optimizer: Any, param: Tensor | None, second: str) -> None:
    groups = optimizer.param_groups
    groups[:] = [group for group in groups if group.get("name") != second]


EDITS = [slow_down, replace_group, take_out, add_group, remove_group]
STEPS = len(EDITS) + 1


def edit(special: Special, model: nn.Module, optimizer: Any, step: int) -> None:
    if step:
        param = dict(model.named_parameters()).get(special.taken_out)
        EDITS[step - 1](optimizer, param, special.second)


def _none(*_: Any) -> Any:
    """A pipeline runs backward itself, and ``piped`` copies its weights."""
    raise NotImplementedError


def _loss_of_rows(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(pipelines_jobs.rows(number))


_NAMES = "^(1|4)[.]", "3.weight", "1.weight"
PIPELINE = Special(_none, _none, pipelines_jobs.Chain, _loss_of_rows, 1, _none, *_NAMES)


def piped(zero: int) -> dict[str, Any]:
    """The same edits under a pipeline of two stages, and a checkpoint after one more of them."""
    run = pipelines_jobs.Run("adamw", grouped(PIPELINE.second), zero=zero)
    engine = pipelines_jobs.start(run)
    before = plain.weights(engine.module)
    for step in range(STEPS):
        edit(PIPELINE, engine.module, engine.optimizer, step)
        engine.train_batch(pipelines_jobs.batches(engine, step))
    after, twice = plain.weights(engine.module), []
    edit(PIPELINE, engine.module, engine.optimizer, EDITS.index(take_out) + 1)
    with shared_folder() as folder:
        engine.save_checkpoint(folder)
        for _ in range(2):
            engine.train_batch(pipelines_jobs.batches(engine, STEPS))
            twice.append(plain.weights(engine.module))
            engine.load_checkpoint(folder)
    assert same(*twice)
    return {"before": before, "after": after}


STAGES = {"tensor parallelism": (0, 3), "sequences": (1, 3), "experts": (1, 2), "offload": (2, 3)}
CASES = [(layout, stage) for layout, stages in STAGES.items() for stage in stages]
QUICK_EDITS = [("sequences", 3, 2, 0.05)]
EDITED = [(*at, *how) for at in CASES for how in ((1, 0.0), (1, 0.05), (2, 0.05))]
EDITED = pairs(EDITED, lambda case: (case[0], case[1], case[2:]), QUICK_EDITS)


@pytest.mark.parametrize("layout, stage, passes, max_norm", params(EDITED, QUICK_EDITS))
def test_edits_of_groups_are_followed_by_any_loss(layout, stage, passes, max_norm):
    for got in worlds.run(2, edited, layout, stage, passes, max_norm):
        assert got["error"] <= 1e-5 and got["off"] <= 1e-6
        out, later = zip(*got["stayed"], strict=True)
        assert out == (False, False, False, True, False, False)  # while it was in no group
        assert later == (False, False, False, False, False, True)  # after its group was removed


@pytest.mark.parametrize("world, zero", params([(2, 0), (2, 1), (4, 1)], []))
def test_edits_of_groups_are_followed_by_a_pipeline_and_saved(world, zero):
    ranks = worlds.run(world, piped, zero)
    before = {n: p for rank in ranks for n, p in rank["before"].items()}
    alone = alone_by_torch(PIPELINE, PIPELINE.loss_alone, start=before)
    for rank in ranks:
        assert error(rank["after"], alone) <= 1e-5
