"""ZeRO among groups of ranks that hold copies: jobs of test_shard_size.py, on real ranks."""

import copy
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import zero_to_fp32

import ds_ext
from ds_ext.checkpoint import manifests
from ds_ext.distributed.groups import size_of
from tests.common import by_role, models, updates
from tests.common.ranks import identical, message, shared_folder, whole
from tests.distributed import resume_jobs, training_jobs
from tests.distributed.training_jobs import Training


def cut(size: int) -> dict[str, Any]:
    return {"ds_ext": {"shard_size": size}}


# Runs by name: ranks of a copy, 0 for all of them; and what a script sets.
RUNS: dict[str, tuple[int, Training]] = {
    "adalomo": (2, Training("adalomo", 3, extra=cut(2))),
    "came-clip": (2, Training("came", 3, max_norm=0.3, extra=cut(2))),
    "came-accumulation": (2, Training("came", 3, max_norm=0.4, accumulation=2, extra=cut(2))),
    "galore": (2, Training("galoreadamw", 3, extra=cut(2))),
    "lamb": (2, Training("lamb", 3, extra=cut(2))),
    "adafactor-stage1": (2, Training("adafactor", 1, max_norm=0.5, extra=cut(2))),
    "adamw-stage2": (2, Training("adamw", 2, extra=cut(2))),
    "muon": (2, Training("muon", 3, max_norm=0.3, extra=cut(2))),
    "apollo-stage2": (2, Training("apollo", 2, extra=cut(2))),
    "apollomini-stage1": (2, Training("apollomini", 1, extra=cut(2))),
    "apollo": (2, Training("apollo", 3, extra=cut(2))),
    "apollomini": (2, Training("apollomini", 3, extra=cut(2))),
    "muon-stage1": (2, Training("muon", 1, extra=cut(2))),
    "adalomo-alone": (1, Training("adalomo", 3, max_norm=0.3, extra=cut(1))),
    "adalomo-stage1-alone": (1, Training("adalomo", 1, extra=cut(1))),
    "adalomo-one": (0, Training("adalomo", 3, extra=cut(4))),
}


class Sent:
    """Notes what collectives of gradients and of sums are begun, and among how many ranks."""

    METHODS = ("reduce_scatter_tensor_coalesced", "allreduce_coalesced")

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __enter__(self) -> "Sent":
        self.patches = [
            mock.patch.object(dist.ProcessGroup, m, self._noting(m)) for m in self.METHODS
        ]
        self.patches.append(
            mock.patch.object(dist, "all_reduce", self._noting("sum", dist.all_reduce))
        )
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()

    def _noting(self, name: str, function: Any = None) -> Any:
        original = function or getattr(dist.ProcessGroup, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            group = args[0] if function is None else kwargs.get("group")
            kind = "most" if kwargs.get("op") == dist.ReduceOp.MAX else name  # what hosts compare
            self.calls.append((kind, size_of(group or dist.group.WORLD)))
            return original(*args, **kwargs)

        return noting


def train(name: str) -> dict[str, Any]:
    """A run, the collectives of its last step, and whether all ranks end with the same bits."""
    _, run = RUNS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    model = models.make(dropout=0.3)
    engine = training_jobs.start(run, model)
    before, norms = whole(model), []
    for step in range(training_jobs.STEPS):
        with Sent() as sent:
            for part in range(run.accumulation):
                loss = training_jobs.loss_of(engine, run, step, part, rank, world)
                training_jobs.backward(engine, run, loss, part)
        norms.append(engine.get_global_grad_norm())
    layout = engine.optimizer.layout
    after = whole(model)
    return {
        "before": before,
        "after": after,
        "norms": norms,
        "calls": sent.calls,
        "shards": {p.num_shards for p in layout.placements},
        "held": sum(t.numel() for t in layout.stored()),
        "identical": identical(after),
        "told": by_role.told(engine.optimizer, model),
    }


def rounded(stage: int) -> dict[str, Any]:
    """bf16 weights rounded at random, and a step whose gradient is not finite on one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    run = Training("adalomo", stage, extra={**cut(2), "bf16": {"enabled": True}})
    model = models.make(tensors=False)
    engine = training_jobs.start(run, model)
    before, same, skipped = whole(model), [], []
    for step in range(4):
        loss = training_jobs.loss_of(engine, run, step, 0, rank, world)
        if step == 2 and rank == world - 1:
            loss = loss * float("nan")
        held = whole(model)
        engine.backward(loss)
        engine.step()
        after = whole(model)
        skipped.append(all(torch.equal(held[n], after[n]) for n in held))
        same.append(identical(after))
    told = engine.skipped_steps
    moved = sum(not torch.equal(before[n], after[n]) for n in after)
    return {"same": same, "skipped": skipped, "told": told, "moved": moved}


def _steps(engine: deepspeed.DeepSpeedEngine, numbers: range) -> None:
    """Steps by rows that every rank has of its own."""
    for step in numbers:
        row = models.batch(step, dist.get_world_size())[dist.get_rank(), :1]
        engine.backward(engine(row, step=step))
        engine.step()


def saved(kind: str, stage: int, further: list[tuple[int, int]]) -> dict[str, Any]:
    """Goes on from a checkpoint, in the same groups and in others: (stage, ranks of a copy)."""
    with shared_folder() as folder:
        engine = resume_jobs.start(kind, stage, **cut(2))
        before = whole(engine.module)
        _steps(engine, range(2))
        engine.save_checkpoint(folder)
        middle = whole(engine.module)
        _steps(engine, range(2, 4))
        after = whole(engine.module)
        found, same = [], None
        for at, size in [(stage, 2), *further]:
            other = resume_jobs.start(kind, at, seed=8, **cut(size))
            other.load_checkpoint(folder)
            loaded = resume_jobs.same(middle, whole(other.module))
            _steps(other, range(2, 4))
            ended = whole(other.module)
            same = resume_jobs.same(after, ended) if same is None else same
            found.append((loaded, updates.error(ended, after, before), identical(ended)))
        dist.barrier()
        tool = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        told = all(torch.equal(tool[n], middle[n]) for n in tool) and tool.keys() == middle.keys()
        manifest = manifests.read(Path(folder) / "global_step2")
        files = [len(manifest[kind]) for kind in ("model_files", "state_files")]
        dist.barrier()
    return {"found": found, "same": same, "zero_to_fp32": told, "files": files}


def built() -> dict[str, Any]:
    """A model that is cut while it is built, from other numbers on each rank; then modified."""
    rank, world = dist.get_rank(), dist.get_world_size()
    run = Training("adalomo", 3, extra=cut(2))
    torch.manual_seed(rank)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(training_jobs.config(run), file)
        file.flush()
        with deepspeed.zero.Init(config_dict_or_path=file.name):
            model = models.Zoo()
    first = whole(model)
    for modifier in (0, 3, 1):
        with deepspeed.zero.GatheredParameters(model.up.weight, modifier_rank=modifier):
            if rank == modifier:
                model.up.weight.data.fill_(modifier + 1)
        modified = whole(model)["up.weight"]
        assert torch.equal(modified, torch.full_like(modified, modifier + 1))
    engine = training_jobs.start(run, model)
    engine.backward(training_jobs.loss_of(engine, run, 0, 0, rank, world))
    engine.step()
    other = replace(run, extra=cut(4))
    engine.destroy()
    told = message(lambda: training_jobs.start(other, model))
    return {"same": identical(first), "after": identical(whole(model)), "told": told}


def secondary_copies(frozen: int) -> list[tuple[float, float]]:
    """Losses of hpZ with persistent biases, one of them frozen, and those of one process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    model[frozen].bias.requires_grad_(False)
    reference = copy.deepcopy(model)
    zero = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 10}
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=ds_ext.LOMO(trained, lr=0.5),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, **zero},
        },
    )
    sgd, found = torch.optim.SGD([*reference.parameters()], lr=0.5), []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        losses = [m(x).square().mean() for m in (engine, reference)]
        engine.backward(losses[0])
        losses[1].backward()
        engine.step()
        sgd.step()
        sgd.zero_grad()
        found.append(tuple(loss.item() for loss in losses))
    return found
