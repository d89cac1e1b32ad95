"""Saves: unusual dtypes, tags that differ, functions that fail, Ctrl-C."""

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as deepspeeds
from torch import nn

import ds_ext
from ds_ext.checkpoint import manifests
from ds_ext.distributed import consensus
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.ranks import logged, message
from tests.unit.test_saving_over import Killed, age, kill_before

# What gloo and NCCL know no numbers of, but models hold: quantized and complex values.
ODD = {"int16": torch.int16, "uint16": torch.uint16, "float8": torch.float8_e4m3fn}
ODD |= {"complex": torch.complex64, "bool": torch.bool}


def odd_values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[3, 5] values of a dtype, from random bytes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(3, 5, generator=generator) > 0.5
    if dtype.is_complex:
        return torch.randn(3, 5, dtype=dtype, generator=generator)
    return torch.randint(0, 99, (3, 5), generator=generator).to(dtype)


class Quantized(nn.Module):
    """A trained layer beside frozen weights and buffers of many dtypes."""

    def __init__(self, seed: int, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(6, 7)
        for i, (name, dtype) in enumerate(ODD.items()):
            self.register_buffer(f"buffer_{name}", odd_values(dtype, seed + i))
            if frozen:
                values = odd_values(dtype, seed + 50 + i)
                self.register_parameter(f"frozen_{name}", nn.Parameter(values, requires_grad=False))
        self.register_buffer("count", torch.tensor(seed, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {n: v.detach().clone() for n, v in model.state_dict().items()}


def bits(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    flat = {n: v.contiguous().view(-1).view(torch.uint8) for n, v in values.items()}
    return {n: bytes(v.tolist()) for n, v in flat.items()}


def engine_of(stage: int, model: nn.Module, **more: Any) -> deepspeed.DeepSpeedEngine:
    optimizer = ds_ext.CAME([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return engines.start(model, optimizer, stage, **more)


class Fault(Exception):
    """An error that no code expects."""


# Functions that are themselves collectives of others, or of ds_ext: all ranks must reach them.
COLLECTIVE = {"checkpoint_event_epilogue", "_publish", "gathered", "several", "explained"}
COLLECTIVE |= {"tell", "told"}


class Calls:
    """The functions of ds_ext and of DeepSpeed's engine that ``run_on_all_ranks`` calls.

    The first call of ``failing``, a file and line, raises ``Fault``.
    """

    def __init__(self, failing: tuple[str, int] | None = None) -> None:
        self.failing = failing
        self.seen: dict[tuple[str, int], str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not _is_ours(code.co_filename):
            return
        key = code.co_filename, code.co_firstlineno
        if key in self.seen or self.failing not in (None, key):
            return
        above = list(_callers(frame))
        is_surrounded = any(caller.co_filename == consensus.__file__ for caller in above)
        if is_surrounded and not COLLECTIVE & {caller.co_name for caller in (code, *above)}:
            self.seen[key] = code.co_name
            if key == self.failing:
                raise Fault(code.co_name)

    def __enter__(self) -> "Calls":
        gc.disable()  # finalizers would come at any time
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


@functools.cache
def _is_ours(file: str) -> bool:
    in_ds_ext = file.startswith(str(Path(ds_ext.__file__).parent)) and file != consensus.__file__
    return in_ds_ext or file == deepspeeds.__file__


def _callers(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        yield frame.f_code


def failing_one_by_one(actions: dict[str, Callable[[], Any]], least: int, every: int) -> None:
    """Makes functions that actions call, at least so many, raise on one rank.

    Every rank must raise the same error at once. Of the functions, each ``every``-th is tried.
    Actions are by the name of a function that must be among them.
    """
    wrong, number = [], 0
    for name, action in actions.items():
        action()  # what is made once is made
        with Calls() as calls:
            action()
        assert name in calls.seen.values(), f"{name} itself is not surrounded"
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, calls.seen)
        for victim, seen in enumerate(everyone):
            for key, function in seen.items():
                number += 1
                if number % every:
                    continue
                began = time.monotonic()
                with Calls(key) if victim == dist.get_rank() else contextlib.nullcontext():
                    told = message(action)
                said, _, _ = told.partition(" No other complete checkpoint")
                if not said.endswith(f"rank {victim}: Fault: {function}"):
                    wrong.append(f"{name}, {function} on rank {victim}: {told}")
                if time.monotonic() - began > 10:
                    wrong.append(f"{name}, {function} on rank {victim}: late")
        action()
    assert number > least and not wrong


@worlds.on(2)
def test_parameters_and_buffers_of_any_dtype_are_sent_without_an_engine():
    model = Quantized(seed=dist.get_rank() * 7)
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.layer.parameters(), lr=0.1))
    assert bits(held(model)) == bits(Quantized(seed=0).state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2])
@worlds.on(2)
def test_frozen_weights_of_any_dtype_are_loaded(tmp_path, stage):
    first, second = (engine_of(stage, Quantized(seed)) for seed in (1, 2))
    first.save_checkpoint(tmp_path, tag=0)
    second.load_checkpoint(tmp_path, tag=0)
    assert bits(held(first.module)) == bits(held(second.module))
    assert (tmp_path / "latest").read_text() == "0"  # the tag that was given


@pytest.mark.parametrize("mode", ["Ignore", "Warn", "Fail"])
@worlds.on(2)
def test_tags_that_differ_by_rank_are_taken_as_tag_validation_says(tmp_path, mode):
    engine = engine_of(1, nn.Linear(3, 5), checkpoint={"tag_validation": mode})
    weight, told = engine.module.weight, "the ranks give different tags"
    with logged() as said:
        for value, action in ((2, engine.save_checkpoint), (3, engine.load_checkpoint)):
            with torch.no_grad():
                weight.fill_(value)
            error = message(functools.partial(action, tmp_path, tag=f"tag{dist.get_rank()}"))
            assert (told in error) == (mode == "Fail")
    assert (told in " ".join(said)) == (mode == "Warn" and dist.get_rank() == 0)
    dist.barrier()
    entries = {entry.name for entry in tmp_path.iterdir()}
    if mode == "Fail":
        assert not entries and weight.mean() == 3
    else:
        assert "tag0" in entries and "tag1" not in entries and weight.mean() == 2


@pytest.mark.parametrize("stage, every", params([(0, 2), (3, 1), (3, 40)], [(3, 40)]))
@worlds.on(2, limit=300)
def test_a_function_of_a_save_or_load_that_fails_on_one_rank_fails_on_all(tmp_path, stage, every):
    engine = engine_of(stage, Quantized(seed=1))
    save = functools.partial(engine.save_checkpoint, tmp_path, client_state={"a": 1})
    load = functools.partial(engine.load_checkpoint, tmp_path)
    failing_one_by_one({"save_checkpoint": save, "load_checkpoint": load}, 100, every)


@worlds.on(1)
def test_after_ctrl_c_in_a_save_one_goes_on(tmp_path):
    """At each change of a folder in turn."""
    saved = engine_of(1, nn.Linear(3, 5, bias=False))

    def stepped(steps: int) -> None:
        saved.global_steps = steps
        with torch.no_grad():
            saved.module.weight.fill_(steps)

    for number in range(1000):
        stepped(number)
        done = False
        with pytest.MonkeyPatch.context() as patched, contextlib.suppress(Killed):
            kill_before(patched, number)
            saved.save_checkpoint(tmp_path, tag="both")
            done = True
        before = manifests.newest_checkpoint(tmp_path)
        assert not number or (before and before.steps in (number, number - 1 + 5000)), number
        stepped(number + 5000)
        age(tmp_path)  # what it left is removed after half an hour
        saved.save_checkpoint(tmp_path, tag="both")
        saved.load_checkpoint(tmp_path)
        assert (saved.module.weight == 5000 + number).all(), number
        assert not [*tmp_path.glob(".*")], number
        if done:
            break
    assert number > 20
