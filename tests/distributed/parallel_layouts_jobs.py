"""What users do beside plain steps, where ranks hold more than ZeRO's cuts: jobs.

Tensor parallelism, sequence parallelism, experts that ranks share out, and offload, each beside
torch's AdamW on the same model in one process.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from tests.common import engines, updates
from tests.common.plain import mean_step
from tests.common.ranks import message, shared_folder, whole
from tests.common.states import tensors
from tests.distributed import (
    expert_parallel_jobs,
    offload_jobs,
    pipelines_jobs,
    tensor_parallel_jobs,
    ulysses_jobs,
)

HYPERS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}
WORLD = 2


@dataclass(frozen=True)
class Special:
    """A way to lay out a model on two ranks, and the same model in one process."""

    engine: Callable[[dict[str, Any]], deepspeed.DeepSpeedEngine]  # of a config
    loss: Callable[[Any, int], Tensor]  # of this rank, of a number of a batch
    alone: Callable[[], nn.Module]
    loss_alone: Callable[[nn.Module, int], Tensor]  # of all ranks
    weights: Callable[[deepspeed.DeepSpeedEngine], dict[str, Tensor]]
    elsewhere: Callable[[dict[str, Any]], deepspeed.DeepSpeedEngine]  # on other ranks
    second: str = r"qkv|down"  # the names of the parameters of the second group
    taken_out: str = "out.weight"  # the name of a parameter of the first group
    later: str = "down.weight"  # the name of one of the second


def _tensor_parallel() -> Special:
    def engine(config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
        made = tensor_parallel_jobs.FUSED | config
        return initialized(tensor_parallel_jobs.make("fused"), made)

    return Special(
        engine,
        lambda model, number: tensor_parallel_jobs.loss_of(model, "fused", number, 0),
        lambda: tensor_parallel_jobs.make("fused"),
        lambda model, number: tensor_parallel_jobs.loss_of(model, "fused", number, 0),
        lambda engine: tensor_parallel_jobs.weights(engine)[0],
        engine,
    )


def _sequences() -> Special:
    half = ulysses_jobs.LENGTH // 2

    def loss(model: Any, number: int) -> Tensor:
        start = half * dist.get_rank()
        return ulysses_jobs.loss_of(model, number, 0, slice(start, start + half))

    return Special(
        ulysses_jobs.initialized,
        loss,
        ulysses_jobs.make,
        lambda model, number: ulysses_jobs.loss_of(model, number, 0, slice(None)),
        lambda engine: whole(engine.module),
        lambda config: initialized(ulysses_jobs.make(), config),
    )


def _experts() -> Special:
    @torch.no_grad()
    def fill(params: dict[str, nn.Parameter]) -> None:
        for name, p in params.items():
            p.copy_(expert_parallel_jobs.values()[name])

    def engine(size: int, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
        model = expert_parallel_jobs.Whole(size)
        groups._create_expert_and_data_parallel(size)
        fill(expert_parallel_jobs.named(model))
        return initialized(model, config)

    def alone() -> nn.Module:
        model = expert_parallel_jobs.Whole()
        fill(dict(model.named_parameters()))
        return model

    return Special(
        functools.partial(engine, 2),
        lambda model, number: expert_parallel_jobs.loss_of(model, number + 1, dist.get_rank()),
        alone,
        lambda model, number: (
            sum(expert_parallel_jobs.loss_of(model, number + 1, rank) for rank in range(WORLD))
            / WORLD
        ),
        lambda engine: {
            name: p.detach().clone()
            for name, p in expert_parallel_jobs.named(engine.module).items()
        },
        functools.partial(engine, 1),
        r"up|down",
        "wide.weight",
    )


def _offloaded() -> Special:
    def alone() -> nn.Module:
        torch.manual_seed(5)
        return offload_jobs.Tower()

    def engine(config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
        zero = config["zero_optimization"]
        zero |= {"stage3_param_persistence_threshold": 45, **offload_jobs.STATE}
        if zero["stage"] == 3:
            zero |= offload_jobs.PARAM
        return initialized(alone(), config)

    def loss_of(model: Any, number: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + rank)
        x = torch.randn(3, 12, generator=generator)
        return model(x.to(next(model.parameters()).device))

    return Special(
        engine,
        lambda engine, number: loss_of(engine, number, dist.get_rank()),
        alone,
        lambda model, number: sum(loss_of(model, number, rank) for rank in range(WORLD)) / WORLD,
        offload_jobs.weights,
        engine,
        r"second",
        "first.weight",
        "second.weight",
    )


LAYOUTS: dict[str, Callable[[], Special]] = {
    "tensor parallelism": _tensor_parallel,
    "sequences": _sequences,
    "experts": _experts,
    "offload": _offloaded,
}


def initialized(model: nn.Module, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    return deepspeed.initialize(model=model, config=config)[0]


@contextlib.contextmanager
def laid_out(layout: str) -> Iterator[Special]:
    """A layout; what is offloaded lies on a pretended device otherwise."""
    around = offload_jobs.place(True) if layout == "offload" else contextlib.nullcontext()
    with around:
        yield LAYOUTS[layout]()


def config(special: Special, stage: int, rule: str = "adamw", **more: Any) -> dict[str, Any]:
    """The config of an engine with two groups of parameters."""
    hypers = HYPERS if rule == "adamw" else {"lr": 1e-3}
    params = hypers | {"param_groups": [{"match": special.second, "lr": hypers["lr"]}]}
    optimizer = {"type": f"ds_ext.{rule}", "params": params}
    return engines.config(stage, optimizer=optimizer, zero={"reduce_bucket_size": 1500}, **more)


class Reference:
    """The same training by torch's AdamW in one process."""

    def __init__(self, special: Special, start: dict[str, Tensor] | None = None) -> None:
        self.model = special.alone()
        self.model.load_state_dict(start or {}, strict=False)
        self.before = self.weights()
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        first = [p for n, p in named if not re.search(special.second, n)]
        second = [p for n, p in named if re.search(special.second, n)]
        named_group = {"params": second, "name": special.second}
        self.optimizer = torch.optim.AdamW([{"params": first}, named_group], **HYPERS)

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def step(self, loss: Tensor, max_norm: float = 0.0) -> None:
        mean_step(self.optimizer, [loss], max_norm)

    def error(self, after: dict[str, Tensor]) -> float:
        """‖difference‖ / ‖update‖ of what this rank holds."""
        expected = {n: p for n, p in self.weights().items() if n in after}
        return updates.error({n: p.cpu() for n, p in after.items()}, expected, self.before)


def projected(layout: str, stage: int) -> float:
    """Gradients of GaLore-AdamW kept projected, against kept whole -> the error."""
    with laid_out(layout) as special:
        found = []
        for policy in ("sharded", "projected"):
            how = config(special, stage, "galoreadamw", ds_ext={"gradient_policy": policy})
            engine = special.engine(how)
            before = special.weights(engine)
            for step in range(3):
                engine.backward(special.loss(engine, step))
                engine.step()
            found.append(special.weights(engine))
        return updates.error(found[1], found[0], before)


def edited(layout: str, stage: int, passes: int, max_norm: float) -> dict[str, Any]:
    """Edits of param groups between steps, as torch follows them.

    A loss is of two forward passes, and of a trained factor that is not the engine's.
    """
    with laid_out(layout) as special:
        reference, off = Reference(special), []
        more = {"gradient_accumulation_steps": passes, "gradient_clipping": max_norm}
        engine = special.engine(config(special, stage, **more))
        factor = nn.Parameter(torch.tensor(1.5, device=engine.device))
        own = dict(engine.module.named_parameters())
        alone = dict(reference.model.named_parameters())

        def loss_of(loss: Callable[[Any, int], Tensor], model: Any, number: int) -> Tensor:
            return loss(model, 2 * number) + 0.5 * loss(model, 2 * number + 1)

        stayed = []
        for step in range(len(EDITS) + 1):
            if step:
                for optimizer, named in ((engine.optimizer, own), (reference.optimizer, alone)):
                    EDITS[step - 1](optimizer, named[special.taken_out], special.second)
            before = special.weights(engine)
            numbers = range(step * passes, (step + 1) * passes)
            for number in numbers:
                factor.grad = None
                loss = loss_of(special.loss, engine, number)
                engine.backward(loss * factor)
                wanted = loss.detach() / passes
                off.append(float((factor.grad - wanted).abs() / wanted))
                engine.step()
            losses = [loss_of(special.loss_alone, reference.model, number) for number in numbers]
            reference.step(1.5 * sum(losses) / passes, max_norm)
            after = special.weights(engine)
            stayed.append(
                [torch.equal(after[n], before[n]) for n in (special.taken_out, special.later)]
            )
        error = reference.error(special.weights(engine))
        return {"error": error, "off": max(off), "stayed": stayed}


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


def saved(layout: str, stage: int, folder: str) -> str:
    """Two steps, and a checkpoint with states cast to fp64; what is told of a state resized."""
    with laid_out(layout) as special:
        engine = special.engine(config(special, stage))
        for step in range(2):
            engine.backward(special.loss(engine, step))
            engine.step()
        kept = [state for state in engine.optimizer.state.values() if state]
        for state in kept[::2]:
            state |= {k: x.double() for k, x in state.items() if isinstance(x, Tensor)}
        engine.save_checkpoint(folder, tag="double")
        kept[0]["v"] = torch.cat([kept[0]["v"], kept[0]["v"]])
        return message(lambda: engine.save_checkpoint(folder, tag="resized"))


def loaded(layout: str, stage: int, folder: str) -> dict[str, Any]:
    """Goes on from it on these ranks, after an engine of another optimizer has refused it."""
    with laid_out(layout) as special:
        reference = Reference(special)
        for step in range(2):
            reference.step(special.loss_alone(reference.model, step))
        reference.before = reference.weights()
        other = special.elsewhere(config(special, stage, "came"))
        before = special.weights(other)
        told = message(lambda: other.load_checkpoint(folder, tag="double"))
        same = all(torch.equal(p, before[n]) for n, p in special.weights(other).items())
        assert not any(other.optimizer.state.values())
        other.destroy()
        engine = special.elsewhere(config(special, stage))
        engine.load_checkpoint(folder, tag="double")
        dtypes = {x.dtype for s in engine.optimizer.state.values() for x in tensors(s)}
        for step in range(2, 4):
            engine.backward(special.loss_alone(engine, step))
            engine.step()
            reference.step(special.loss_alone(reference.model, step))
        error = reference.error(special.weights(engine))
        return {"error": error, "dtypes": dtypes, "told": told, "same": same}


def _of_pipeline() -> Special:
    """What ``Reference`` takes of a pipeline, which has no losses of its own to be run backward."""

    def none(*_: Any) -> Any:
        raise NotImplementedError

    def loss(model: nn.Module, number: int) -> Tensor:
        return model(pipelines_jobs.rows(number))

    alone = pipelines_jobs.Chain
    return Special(none, none, alone, loss, none, none, "^(1|4)[.]", "3.weight", "1.weight")


def piped(zero: int) -> dict[str, Any]:
    """The same edits under a pipeline of two stages, and a checkpoint after one more of them."""
    special = _of_pipeline()
    params = HYPERS | {"param_groups": [{"match": special.second, "lr": HYPERS["lr"]}]}
    engine = pipelines_jobs.start(pipelines_jobs.Run("adamw", params, zero=zero))
    own = dict(engine.module.named_parameters())
    before = pipelines_jobs.copied(engine)
    for step in range(len(EDITS) + 1):
        if step:
            EDITS[step - 1](engine.optimizer, own.get(special.taken_out), special.second)
        engine.train_batch(pipelines_jobs.batches(engine, step))
    after, twice = pipelines_jobs.copied(engine), []
    take_out(engine.optimizer, own.get(special.taken_out), special.second)
    with shared_folder() as folder:
        engine.save_checkpoint(folder)
        for _ in range(2):
            engine.train_batch(pipelines_jobs.batches(engine, len(EDITS) + 1))
            twice.append(pipelines_jobs.copied(engine))
            engine.load_checkpoint(folder)
    same = all(torch.equal(p, twice[1][n]) for n, p in twice[0].items())
    return {"before": before, "after": after, "same": same}


def piped_alone(before: dict[str, Tensor]) -> Reference:
    """The same in one process, from the weights that the stages began with."""
    special = _of_pipeline()
    reference = Reference(special, before)
    named = dict(reference.model.named_parameters())
    for step in range(len(EDITS) + 1):
        if step:
            EDITS[step - 1](reference.optimizer, named[special.taken_out], special.second)
        reference.step(special.loss_alone(reference.model, step))
    return reference
