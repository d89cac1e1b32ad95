"""Ranks forked from one process that has imported everything: a world starts in a second.

``run`` forks ranks, runs a job on each and collects how they ended. The process that forks must
never have run backward itself: torch's autograd does not survive it.
"""

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo  # noqa: F401  before the fork, or every rank would do it

import ds_ext  # noqa: F401  imported before the fork

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s


@dataclass
class Ended:
    """How a rank ended."""

    code: int  # exit status; negative: the signal that killed it
    seconds: float
    output: str
    result: Any  # what the job returned


def run(
    world: int, job: Callable[..., Any], *args: Any, timeout: float = 20, limit: float = 300
) -> list[Ended]:
    """Runs ``job(*args)`` on ``world`` ranks, whose collectives wait ``timeout`` seconds.

    After ``limit`` seconds, a rank that has not ended is killed: code -9.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        pids = start(world, job, args, Path(folder), timeout)
        ended = wait(pids, limit)
        return [
            Ended(code, seconds - started, *_found(Path(folder), rank))
            for rank, (code, seconds) in enumerate(ended)
        ]


def every(world: int, runs: dict[str, Any], job: Callable[[Any], Any]) -> dict[str, list[Any]]:
    """What ``job`` returned for each of ``runs``, by run and rank; all must end well."""
    ended = run(world, lambda: {name: job(each) for name, each in runs.items()})
    for rank, end in enumerate(ended):
        assert end.code == 0, f"rank {rank}: {end.output[-3000:]}"
    return {name: [end.result[name] for end in ended] for name in runs}


def start(
    world: int, job: Callable[..., Any], args: tuple[Any, ...], folder: Path, timeout: float
) -> list[int]:
    """Forks the ranks -> their pids."""
    port = _free_port()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _rank(rank, world, port, timeout, job, args, folder)
        pids.append(pid)
    return pids


def wait(pids: list[int], limit: float) -> list[tuple[int, float]]:
    """Waits for the ranks to end -> exit status and time of each; kills what is late."""
    until = time.monotonic() + limit
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < len(pids):
        for pid in pids:
            if pid not in ended:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = (os.waitstatus_to_exitcode(status), time.monotonic())
        time.sleep(0.01)
    return [ended[pid] for pid in pids]


def _rank(rank, world, port, timeout, job, args, folder) -> None:
    """A forked rank: never returns."""
    code = 1
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        torch.set_num_threads(1)
        deepspeed.init_distributed("gloo", timeout=timedelta(seconds=timeout), verbose=False)
        torch.save(job(*args), folder / f"{rank}.pt")
        torch.distributed.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # see leave.py


def _found(folder: Path, rank: int) -> tuple[str, Any]:
    result = folder / f"{rank}.pt"
    loaded = torch.load(result, weights_only=False) if result.exists() else None
    output = folder / f"{rank}.txt"
    return output.read_text(errors="replace") if output.exists() else "", loaded


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
