"""Param groups that are edited under a pipeline: jobs."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.common.ranks import shared_folder
from tests.distributed import (
    pipelines_jobs,
)
from tests.distributed.parallel_layouts_jobs import EDITS, HYPERS, Reference, Special, take_out


def _of_pipeline() -> Special:
    """What ``Reference`` takes of a pipeline, which has no losses of its own to be run backward."""

    def none(*_: Any) -> Any:
        raise NotImplementedError

    def alone() -> nn.Module:
        return pipelines_jobs.Chain()

    return Special(
        none, none, alone, lambda model, number: model(pipelines_jobs.rows(number)), none, none,
        "^(1|4)[.]", "3.weight", "1.weight",
    )  # fmt: skip


def piped(zero: int) -> dict[str, Any]:
    """The same edits under a pipeline of two stages, and a checkpoint after one more of them."""
    special = _of_pipeline()
    params = HYPERS | {"param_groups": [{"match": special.second, "lr": HYPERS["lr"]}]}
    engine = pipelines_jobs.start(pipelines_jobs.Run("adamw", params, zero=zero))
    own = dict(engine.module.named_parameters())
    weights, before = [], pipelines_jobs.copied(engine)
    for step in range(len(EDITS) + 1):
        if step:
            EDITS[step - 1](engine.optimizer, own.get(special.taken_out), special.second)
        engine.train_batch(pipelines_jobs.batches(engine, step))
        weights.append(pipelines_jobs.copied(engine))
    take_out(engine.optimizer, own.get(special.taken_out), special.second)
    twice = []
    with shared_folder() as folder:
        engine.save_checkpoint(folder)
        for _ in range(2):
            engine.train_batch(pipelines_jobs.batches(engine, len(EDITS) + 1))
            twice.append(pipelines_jobs.copied(engine))
            engine.load_checkpoint(folder)
    same = all(torch.equal(p, twice[1][n]) for n, p in twice[0].items())
    return {"before": before, "weights": weights, "same": same, "twice": twice[0]}


def piped_alone(before: dict[str, Tensor]) -> Reference:
    """The same in one process, from the weights that the stages began with."""
    special = _of_pipeline()
    reference = Reference(special)
    named = dict(reference.model.named_parameters())
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(before[name])
    reference.before = reference.weights()
    for step in range(len(EDITS) + 1):
        if step:
            EDITS[step - 1](reference.optimizer, named[special.taken_out], special.second)
        reference.step(special.loss_alone(reference.model, step))
    return reference
