"""One rank of a run on several hosts: launched by an agent on each, local ranks alike on all.

Usage: torchrun --nnodes N --node_rank I ... -m tests.distributed.hosts_jobs OUT.pt SHARED [REGEX]
"""

import functools
import os
import re
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from ds_ext.backward import reduction
from ds_ext.distributed import placement
from tests.common import models
from tests.common.leave import leave
from tests.common.ranks import whole
from tests.distributed import training_jobs
from tests.distributed.training_jobs import Training

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
RUNS = {
    "stage 3": Training("adalomo", 3, max_norm=0.3),
    "stage 1": Training("adalomo", 1),
    "stage 0": Training("came", 0),
    "plain": Training("adalomo", None),
}


def train(run: Training) -> dict[str, Any]:
    """Trains -> weights, and the buckets of every rank in the order in which they were sent."""
    order: list[list[str]] = []
    send = reduction.Reduction.begin

    def noting(self: reduction.Reduction, grads: Any, voters: Any) -> Any:
        order.append([self.layout.name(param) for param in grads])
        return send(self, grads, voters)

    with mock.patch.object(reduction.Reduction, "begin", noting):
        found = training_jobs.train(run)
    return found | {"orders": everyones(order)}


def on_two_hosts(name: str) -> dict[str, Any]:
    """``train`` on four ranks, whose local ranks are those of two hosts."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() % 2), "LOCAL_WORLD_SIZE": "2"}
    return train(RUNS[name])


def everyones(mine: Any) -> list[Any]:
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def local_for_global(run: Training) -> dict[str, Any]:
    """The same with the fault that this is about: a rank takes its local rank for its rank."""
    init = placement.Sharded.__init__

    def wrong(self: placement.Sharded, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        self.shard_index = int(os.environ["LOCAL_RANK"])

    with mock.patch.object(placement.Sharded, "__init__", wrong):
        return training_jobs.train(run)


def save_and_load(shared: str) -> dict[str, Any]:
    """A checkpoint in a folder of all hosts, and in one that each host has for itself."""
    rank, world = dist.get_rank(), dist.get_world_size()
    run = Training("came", 3)

    def steps(engine: Any, numbers: range) -> None:
        for step in numbers:
            engine.backward(training_jobs.loss_of(engine, run, step, 0, rank, world))
            engine.step()

    def message(action: Any) -> str:
        try:
            action()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    engine, other = (training_jobs.start(run, models.make(dropout=0.3)) for _ in range(2))
    steps(other, range(5, 6))  # to differ
    steps(engine, range(2))
    engine.save_checkpoint(shared)
    steps(engine, range(2, 4))
    other.load_checkpoint(shared)
    steps(other, range(2, 4))
    a, b = whole(engine.module), whole(other.module)
    own = "checkpoints"  # of this host's current folder
    told = [message(lambda: engine.save_checkpoint(own, tag="mine"))]
    if rank == 0:
        Path(own, "latest").write_text("mine")
    told.append(message(lambda: other.load_checkpoint(own)))
    return {"equal": all(torch.equal(a[n], b[n]) for n in a), "told": everyones(told)}


def main() -> None:
    out, shared = sys.argv[1:3]
    chosen = re.compile(sys.argv[3] if len(sys.argv) > 3 else "")
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60), verbose=False)
    torch.set_num_threads(1)
    jobs = {name: functools.partial(train, run) for name, run in RUNS.items()}
    jobs["local for global"] = functools.partial(local_for_global, RUNS["stage 1"])
    jobs["checkpoint"] = functools.partial(save_and_load, shared)
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        if chosen.search(name):
            try:
                results[name] = job()
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    told = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    results["ranks"] = everyones([*(os.environ[name] for name in told), os.getcwd()])
    if dist.get_rank() == 0:
        torch.save(results, out)
    leave()


if __name__ == "__main__":
    main()
