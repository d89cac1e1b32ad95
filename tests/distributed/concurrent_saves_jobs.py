"""Two jobs that save into one folder, one of which is killed again and again."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from ds_ext.checkpoint import manifests
from tests import worlds
from tests.distributed.storing_jobs import engine_of

SAVES = 40


def engine() -> deepspeed.DeepSpeedEngine:
    return engine_of(1, torch.nn.Linear(3, 5, bias=False))


def save(folder: str, job: int, tag: str, start: int) -> None:
    """Saves checkpoints whose weights and steps tell which they are; notes what has returned."""
    saved = engine()
    for i in range(start, SAVES):
        saved.global_steps = job * 1000 + i
        with torch.no_grad():
            saved.module.weight.fill_(saved.global_steps)
        saved.save_checkpoint(folder, tag=tag.format(job=job, i=i))
        if dist.get_rank() == 0:
            with open(f"{folder}.{job}", "a") as file:
                file.write(f"{saved.global_steps}\n")


def returned(folder: str, job: int) -> list[int]:
    """Steps of the checkpoints of a job whose save returned."""
    file = Path(f"{folder}.{job}")
    return [int(n) for n in file.read_text().split()] if file.exists() else []


def side_by_side(folder: str, ranks: int, tag: str, kills: int) -> list[str]:
    """Two jobs save at once; a rank of the first is killed, and the job goes on, so many times.

    Returns the ends of what ranks wrote that failed without being killed.
    """
    chance = random.Random(kills)
    second = worlds.begin(ranks, save, folder, 2, tag, 0, timeout=60)
    for left in range(kills, -1, -1):
        done = len(returned(folder, 1))
        first = worlds.begin(ranks, save, folder, 1, tag, done, timeout=60)
        while left and first.is_alive() and len(returned(folder, 1)) == done:
            time.sleep(0.01)
        if left:
            time.sleep(chance.uniform(0, 0.2))
            chance.choice(first.processes).kill()
        last = first.end(limit=90)
    return [rank.output for rank in [*last, *second.end(limit=90)] if rank.code]


def load_all(folder: str) -> dict[str, int]:
    """Saves once more, then verifies and loads all checkpoints -> their steps by tag."""
    loaded, found = engine(), {}
    loaded.save_checkpoint(folder, tag="another", save_latest=False)
    for path in Path(folder).iterdir():
        if path.is_dir() and path.name != "another":
            said = manifests.read(path)
            manifests.verify(path, said["files"], said["files"])
            loaded.load_checkpoint(folder, tag=path.name)
            assert bool((loaded.module.weight == loaded.global_steps).all())
            found[path.name] = loaded.global_steps
    return found


def interrupted(folder: str) -> tuple[int, list[str]]:
    """Ctrl-C at each call of the file system within a save -> how many, and what was wrong."""
    saved, wrong = engine(), []
    for number in range(1000):
        saved.global_steps = number
        with torch.no_grad():
            saved.module.weight.fill_(number)
        done = not _interrupted(number, lambda: saved.save_checkpoint(folder, tag="both"))
        before = manifests.newest_checkpoint(folder)
        if number and (before is None or before.steps not in (number, number - 1 + 5000)):
            wrong.append(f"{number}: {before}")
        saved.global_steps += 5000
        with torch.no_grad():
            saved.module.weight.fill_(saved.global_steps)
        saved.save_checkpoint(folder, tag="both")
        saved.load_checkpoint(folder)
        if not bool((saved.module.weight == 5000 + number).all()):
            wrong.append(f"{number}: another weight")
        if left := [path.name for path in Path(folder).glob(".*")]:
            wrong.append(f"{number}: {left}")
        if done:
            break
    return number, wrong


CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "open", "fsync")


def _interrupted(number: int, action: Callable[[], Any]) -> bool:
    """Runs something with Ctrl-C before the call of this number -> whether it came."""
    left = number

    def calling(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGINT)
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, calling(getattr(os, name))))
        stack.enter_context(mock.patch.object(torch, "save", calling(torch.save)))
        try:
            action()
        except KeyboardInterrupt:
            return True
    return left < 0
