"""Runs a job on real ranks of this machine: forked processes that join a gloo group."""

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist


def on_ranks(world: int, job: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of ``job(*args)`` on rank 0 of ``world`` forked ranks of one thread each.

    This process must not have run backward: torch's autograd does not survive a fork.

    Raises:
        RuntimeError: a rank failed.
    """
    return _forked(world, True, job, args)


def apart(job: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of ``job(*args)`` in a forked process without a process group."""
    return _forked(1, False, job, args)


def _forked(world: int, in_group: bool, job: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    context = torch.multiprocessing.get_context("fork")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        found = Path(folder) / "found"
        ranks = [
            context.Process(target=_rank, args=(rank, world, port, in_group, found, job, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in ranks]}")
        return torch.load(found, weights_only=False)


def _rank(rank, world, port, in_group, found, job, args) -> None:
    """Runs one rank. It never returns."""
    code = 1
    try:
        torch.set_num_threads(1)
        if in_group:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world}
            own = address | {"RANK": rank, "LOCAL_RANK": rank}
            os.environ.update({key: str(value) for key, value in own.items()})
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
            deepspeed.init_distributed("gloo", verbose=False)
        result = job(*args)
        if in_group:
            dist.barrier()
        if rank == 0:
            torch.save(result, found)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch sometimes aborts in the teardown of a gloo group
