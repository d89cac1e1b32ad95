"""What goes wrong with real ranks: killed, late, out of disk, different, or given damaged files."""

import errno
import gc
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_ext
from ds_ext import logs
from ds_ext.checkpoint import manifests
from ds_ext.distributed import consensus
from ds_ext.optimizer import RuleOptimizer
from tests import worlds
from tests.common import engines
from tests.common.ranks import shared_folder
from tests.distributed.resume_jobs import message, same, start, steps, whole

KIND, TOTAL, WHEN, VICTIM = "came", 4, 2, 1


def train(folder: str, stage: int, fault: str = "") -> dict[str, Any]:
    """Goes on from the newest checkpoint to step ``TOTAL``, saving each; a fault on the way."""
    engine = start(KIND, stage)
    engine.load_checkpoint(folder)
    told = []
    first = engine.global_steps
    for step in range(first, TOTAL):
        if step == WHEN and fault and dist.get_rank() == VICTIM:
            FAULTS[fault](engine)
        steps(engine, range(step, step + 1))
        told.append(message(lambda: engine.save_checkpoint(folder)))
        restore_limits()
    return {"first": first, "weights": whole(engine), "told": told}


def unbroken() -> dict[str, Any]:
    with shared_folder() as folder:
        return train(folder, 3)


def restore_limits() -> None:
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    torch.save = SAVE


SAVE = torch.save


def _kill(*_: Any, **__: Any) -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(*_: Any) -> None:
    raise ValueError("this rank's forward fails")


def _torn(state: Any, path: str, **more: Any) -> None:
    SAVE(state, path, **more)
    os.truncate(path, os.path.getsize(path) // 2)
    _kill()


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def _fill_disk(engine: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))


FAULTS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda engine: engine.module.register_forward_pre_hook(_fail),
    "backward": lambda engine: engine.module.up.weight.register_hook(_kill),
    "step": lambda engine: setattr(RuleOptimizer, "update", _kill),
    "save": lambda engine: setattr(torch, "save", _torn),
    "late": lambda engine: engine.module.register_forward_pre_hook(lambda *_: time.sleep(12)),
    "disk full": _fill_disk,
    "no folder": lambda engine: setattr(torch, "save", _refuse),
}


def stage_of(fault: str) -> int:
    return (3, 1, 2)[[*FAULTS].index(fault) % 3]


def suffer(folder: str, fault: str, stage: int) -> dict[str, Any]:
    """A run with a fault, what is on the disk after it, and the same run started again."""
    timeout = 6 if fault == "late" else 60
    failed = worlds.fresh(2, train, folder, stage, fault, timeout=timeout, limit=120)
    found = ds_ext.newest_checkpoint(folder)
    again = worlds.fresh(2, train, folder, stage, timeout=60)
    return {"failed": failed, "found": found, "again": again, "left": os.listdir(folder)}


def damage(folder: str) -> None:
    """Files of a checkpoint that are damaged or of something else are named; nothing is loaded.

    Each file truncated, changed in one byte, or gone; all ranks are told soon.
    """
    engine = start(KIND, 3)
    steps(engine, range(2))
    engine.save_checkpoint(folder, tag="older")
    steps(engine, range(2, 3))
    engine.save_checkpoint(folder, tag="good")
    other = start(KIND, 3, 8)
    before, rank = whole(other), dist.get_rank()

    def refuse(words: str, spoil: Any = None, tag: str | None = "bad", of: Any = other) -> str:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{folder}/bad", ignore_errors=True)
            shutil.copytree(f"{folder}/good", f"{folder}/bad")
            if spoil is not None:
                spoil(Path(folder, "bad"))
        dist.barrier()
        began = time.monotonic()
        told = message(lambda: of.load_checkpoint(folder, tag=tag))
        assert re.search(words, told) and time.monotonic() - began < 10, told
        assert not of.optimizer.state and of.global_steps == 0
        return told

    files = sorted(os.listdir(f"{folder}/good"))
    kinds = [f"{r}_mp_rank_00_{kind}" for r in (0, 1) for kind in ("model", "optim")]
    assert {"ds_ext.json", *(f"zero_pp_rank_{kind}_states.pt" for kind in kinds)} == {*files}
    for file in files:
        for way, (spoil, what) in SPOIL.items():
            words = rf"(?s)bad.*{re.escape(file)} {what}"
            told = refuse(words, lambda path, f=file, s=spoil: s(path / f))
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, told)
            assert everyone == [told] * 2 and same(before, whole(other))
            complete = "Nothing was loaded. Complete checkpoints in .*: good, older"
            assert re.search(complete, told) or (file, way) == ("ds_ext.json", "missing")
    formats = "has format {} .* but this ds_ext reads format 4: a{} ds_ext wrote it"
    refuse(formats.format(99, " newer"), partial(_other_format, 99))
    refuse(formats.format(3, "n older"), partial(_other_format, 3))
    refuse(r"there is no checkpoint .*neither\. .*: good, bad, older", tag="neither")
    empty = r"latest is empty\. .*: bad, good, older"
    refuse(empty, lambda path: Path(folder, "latest").write_text(""), None)
    assert same(before, whole(other))
    saved_with = "this checkpoint was saved with CAME, but the optimizer is "
    refuse(f"good: {saved_with}LAMB", tag="good", of=start("lamb", 3, 8))
    refuse(f"{saved_with}GaLoreAdamW", tag="good", of=start("galore 8-bit", 3, 8))
    shape = r"up.weight has shape \(13, 12\) in the checkpoint and \(12, 13\) in the model"
    refuse(shape, tag="good", of=_narrow())
    groups = "other parameter groups than the optimizer: group 0 differs in col"
    refuse(groups, tag="good", of=_grouped())
    other.load_checkpoint(folder, tag="good")
    assert same(whole(other), whole(engine))


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


SPOIL = {
    "truncated": (_truncate, "is damaged"),
    "flipped": (_flip, "is damaged"),
    "missing": (os.unlink, "is missing"),
}


def _other_format(number: int, path: Path) -> None:
    manifest = json.loads((path / manifests.MANIFEST).read_text())
    manifest = {k: v for k, v in manifest.items() if k != "crc32"} | {"ds_ext": number}
    checksum = manifests._checksum(manifest)
    (path / manifests.MANIFEST).write_text(json.dumps(manifest | {"crc32": checksum}))


def _narrow() -> deepspeed.DeepSpeedEngine:
    model = start(KIND, 0).module
    model.up = torch.nn.Linear(13, 12)
    return engines.start(model, ds_ext.CAME([{"params": list(model.parameters())}]), 0)


def _grouped() -> deepspeed.DeepSpeedEngine:
    model = start(KIND, 0).module
    return engines.start(model, ds_ext.CAME(model.parameters()), 0)


def differ() -> None:
    odd = dist.get_rank() == 1
    clip = 0.5 if odd else None

    def begin(*layers: torch.nn.Module, lr: float = 1e-3, **more: Any) -> None:
        model = torch.nn.Sequential(*layers or (torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)))
        adalomo = {"type": "AdaLomo", "params": {"lr": lr}}
        engines.start(model, None, 3, optimizer=adalomo, **more)

    def swapped() -> torch.nn.Module:
        named = {"a": torch.nn.Linear(4, 5), "b": torch.nn.Linear(4, 6)}
        return torch.nn.ModuleDict({n: named[n] for n in ("ba" if odd else "ab")})

    def own(kind: Any, stage: int | None = 3, **hypers: Any) -> None:
        model = torch.nn.Linear(4, 5)
        engines.start(model, kind(model.parameters(), **hypers), stage)

    def fuse(**arguments: Any) -> None:
        model = torch.nn.Linear(4, 5)
        ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.1), **arguments)

    rate = r"parameter groups: .* \[0\].lr: 0.2 and 0.1"
    lr = 0.1 if odd else 0.2
    policy = "sharded" if odd else "fused"
    for words, case in (
        ("configs: .* gradient_clipping: None and 0.5", lambda: begin(gradient_clipping=clip)),
        ("configs: .* optimizer.params.lr: 0.2 and 0.1", lambda: begin(lr=lr)),
        ("optimizers: .* 'CAME' and 'LAMB'", lambda: own(ds_ext.LAMB if odd else ds_ext.CAME)),
        (rate, lambda: own(ds_ext.LAMB, lr=lr)),
        (rate, lambda: own(ds_ext.LOMO, None, lr=lr)),
        ("arguments: .* policy: .fused. and .sharded.", lambda: fuse(gradient_policy=policy)),
        ("parameters: .* '0.a.weight, .* and '0.b.weight, ", lambda: begin(swapped())),
        (
            r"parameters: .*\[5, 4\], .* and .*\[6, 4\], ",
            lambda: begin(torch.nn.Linear(4, 6 if odd else 5)),
        ),
        ("parameters: .* number: 1 and 2", lambda: begin(torch.nn.Linear(4, 5, bias=odd))),
    ):
        began = time.monotonic()
        told = message(case)
        assert re.search(f"the ranks were started with different {words}", told), told
        assert time.monotonic() - began < 10
        dist.barrier()


def late(folder: str) -> dict[str, list[str]]:
    """What a rank logs while the other is late in saving; while both are slow inside a call."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine, told = start(KIND, 3, zero=zero), dict[str, list[str]]()
    param, read = next(engine.module.parameters()), deepspeed.utils.safe_get_full_fp32_param
    rank, patience = dist.get_rank(), consensus.PATIENCE
    consensus.PATIENCE = 0.5

    def logged(name: str, delay: float, call: Any) -> None:
        handler = BufferingHandler(1000)
        logs.logger.addHandler(handler)
        time.sleep(delay)
        call()
        logs.logger.removeHandler(handler)
        told[name] = [record.getMessage() for record in handler.buffer]

    def slow() -> None:
        with consensus.announced("slow"):
            time.sleep(1.0)
            dist.barrier()

    try:
        logged("late", 1.0 * rank, lambda: engine.save_checkpoint(folder, tag="a"))
        logged("weights", 1.0 * rank, lambda: engine.save_16bit_model(folder))
        logged("reading", 1.0 * rank, lambda: read(param))
        logged("together", 0.0, slow)
    finally:
        consensus.PATIENCE = patience
    return told


def endure(steps_: int) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 30))
    came = {"type": "CAME", "params": {"lr": 1e-4}}
    engine = engines.start(model, None, 3, optimizer=came, gradient_clipping=1.0)
    seen = []
    for step in range(steps_):
        engine.backward(engine(torch.randn(3, 40)).square().sum())
        engine.step()
        if step % 100 == 99:
            time.sleep(0.1)  # gloo's threads let go of what they have sent
            gc.collect()
            tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
            status = Path("/proc/self/status").read_text()
            resident = int(re.search(r"VmRSS:\s+(\d+)", status)[1])
            seen.append((len(tensors), sum(t.numel() for t in tensors), resident))
            del tensors  # or views made anew would live on in it
    return {"seen": seen}


def soak(folder: str, kills: int, seed: int = 0) -> dict[str, Any]:
    """Kills a rank at a random moment, again and again, and starts anew from what is there."""
    chance = random.Random(seed)
    lost, reached, moments, done = [], [], [], 0
    saved = 0
    while done < kills:
        world = chance.choice((1, 2, 2))
        running = worlds.begin(world, run_on, folder, chance.randrange(4), timeout=60)
        while not all("started" in running.told(rank) for rank in range(world)):
            assert running.is_alive(), "a rank ended before its engine had started"
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 2.5))
        chance.choice(running.processes).kill()
        ended = running.end(limit=180)
        done += 1
        found = ds_ext.newest_checkpoint(folder)
        reached.append(found.steps if found else 0)
        told = [int(n) for rank in ended for n in re.findall(r"^saved (\d+)", rank.output, re.M)]
        saved = max([saved, *told])
        if reached[-1] < saved:
            lost.append((done, reached[-1], saved))
        moments.append(ended)
    final = worlds.fresh(1, finish, folder, timeout=60)[0]
    return {"lost": lost, "reached": reached, "moments": moments, "final": final}


def run_on(folder: str, stage: int) -> None:
    """Trains from the newest checkpoint on, saving each step and saying so, until it is killed.

    Not before its engine has started: a rank that is making a process group waits for torch's half
    hour (docs/guides/many-hosts.md).
    """
    engine = start("adalomo", stage)
    print("started", flush=True)
    if found := ds_ext.newest_checkpoint(folder):
        engine.load_checkpoint(found.folder, found.tag)
    for step in range(engine.global_steps, 10**6):
        steps(engine, range(step, step + 1))
        engine.save_checkpoint(folder)
        if dist.get_rank() == 0:
            print(f"saved {engine.global_steps}", flush=True)
            for old in Path(folder).glob("global_step*"):
                if int(old.name[11:]) < engine.global_steps - 2:
                    shutil.rmtree(old)


def finish(folder: str) -> dict[str, Any]:
    """What is reached, and a run of as many steps without a break."""
    engine, other = start("adalomo", 0, 8), start("adalomo", 0)
    found = ds_ext.newest_checkpoint(folder)
    engine.load_checkpoint(found.folder, found.tag)
    before = whole(other)
    steps(other, range(engine.global_steps))
    return {
        "steps": engine.global_steps,
        "found": whole(engine),
        "exact": whole(other),
        "before": before,
    }
