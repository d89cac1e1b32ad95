"""DeepSpeed's tools read our checkpoints, compiled models load them, and no code in a file runs."""

import argparse
import collections
import datetime
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.utils import zero_to_fp32
from torch import nn

import ds_ext
from ds_ext.checkpoint import manifests
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.ranks import REFUSALS
from tests.distributed.resume_jobs import BITS, STAGES, same, start, steps, whole


class Tower(nn.Module):
    """Two layers, one of them frozen, and a buffer that counts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.block = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.block(torch.tanh(self.first(x)))).square().mean()


def compiled(way: str, seed: int) -> nn.Module:
    """A model whose parameters' names contain _orig_mod in three of four ways."""
    model: Any = Tower(seed)
    if way == "submodules":
        model.block = torch.compile(model.block, backend="eager")
        model.frozen = torch.compile(model.frozen, backend="eager")
    elif way in ("model", "both"):
        if way == "both":
            model.block[0] = torch.compile(model.block[0], backend="eager")
        model = torch.compile(model, backend="eager")
    return model


def compiled_engine(way: str, stage: int, seed: int) -> deepspeed.DeepSpeedEngine:
    model = compiled(way, seed)
    optimizer = ds_ext.CAME([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = engines.start(model, optimizer, stage)
    if way == "engine":
        engine.compile(backend="eager")
    return engine


def compiled_step(engine: deepspeed.DeepSpeedEngine, number: int) -> None:
    generator = torch.Generator().manual_seed(number)  # of rank 0 alone are buffers saved
    engine.backward(engine(torch.randn(4, 5, generator=generator)))
    engine.step()


def values(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        found = (*engine.module.parameters(), *engine.module.buffers())
        return [value.detach().clone() for value in found]


TOOLS = [(way, stage) for way in ("fp32", "master") for stage in STAGES] + [("master24", 2)]


@pytest.mark.supports(
    lambda stage: "`zero_to_fp32.py`" if stage else [], stage="stage", optimizer="CAME"
)
@pytest.mark.parametrize("way, stage", params(TOOLS, [("master", 3)]))
@worlds.on(2)
def test_tools_of_deepspeed_read_our_checkpoints(tmp_path, way, stage):
    hypers, more = BITS[way]
    gather = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    engine = start("came", stage, 7, hypers, **more, zero_optimization=gather)
    engine.module.frozen.weight.requires_grad_(False)
    steps(engine, range(3))
    engine.save_checkpoint(tmp_path)
    engine.save_16bit_model(tmp_path, "model.bin")
    weights = whole(engine)
    other = start("lamb", stage, 8, hypers, **more)
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert same(whole(other), weights)
    third = start("lamb", (stage + 1) % 4, 8, hypers, **more)
    steps(third, range(1))
    third.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert same(whole(third), weights)
    assert not third.optimizer.state and third.global_steps == 3
    assert same(weights, torch.load(f"{tmp_path}/model.bin", weights_only=True))
    for file in tmp_path.glob("*/*.pt"):
        torch.load(file, weights_only=True)
    if stage:
        every = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
        found = {n: every[n] for n in weights}
        assert all(found[n].shape == w.shape for n, w in weights.items())
        assert same({n: t.to(weights[n].dtype) for n, t in found.items()}, weights)
        # masters in fp32
        assert any(not torch.equal(t, t.bfloat16().float()) for t in found.values())


WAYS = [("plain", "model"), ("model", "submodules"), ("submodules", "both"), ("both", "engine")]
COMPILED = [(ways, stage) for ways in WAYS for stage in (0, 2)] + [(("plain", "engine"), 3)]


@pytest.mark.parametrize("ways, stage", params(COMPILED, COMPILED[3:4]))
@worlds.on(2)
def test_compiled_in_one_way_and_loaded_in_another(tmp_path, ways, stage):
    first = compiled_engine(ways[0], stage, 0)
    second = compiled_engine(ways[1], stage, 1)
    compiled_step(first, 0)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    for _ in range(2):
        pairs = zip(values(first), values(second), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        for engine in (first, second):
            compiled_step(engine, 1)


PLAIN: dict[str, Any] = {
    "args": argparse.Namespace(lr=1e-3, path=Path("/data/x"), betas=(0.9, 0.95)),
    "random": random.getstate(),
    "numpy": np.random.RandomState(3).get_state(),
    "generator": np.random.default_rng(3).bit_generator.state,
    "arrays": [np.arange(6.0).reshape(2, 3), np.array(["a", "b"]), np.float32(2), np.array([None])],
    "bools": np.array([True]),
    "time": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    "sets": [{1, 2}, frozenset({3, 4}), collections.Counter("aab"), collections.OrderedDict(a=1)],
    "numbers": [1j, 2**70, b"bytes", bytearray(b"x"), None, float("inf"), range(3), slice(1, 2)],
    "tensor": torch.arange(3),
    "torch": torch.get_rng_state(),
    "dtype": [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")],
}


class Mine:
    value = 3


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def engine_of(kind: str, stage: int, dtype: str = "fp32") -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    make = torch.optim.AdamW if kind == "AdamW" else ds_ext.AdaLomo
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
    bf16 = {"enabled": dtype == "bf16"}
    optimizer = make(model.parameters(), lr=1e-3)
    engine = engines.start(model, optimizer, stage, scheduler=scheduler, bf16=bf16)
    weight = next(engine.module.parameters())
    engine.backward(engine(torch.randn(2, 4, dtype=weight.dtype)).float().square().sum())
    engine.step()
    return engine


def describe_anew(manifest: Path, path: Path) -> None:
    """Writes the size and checksum of a changed file into the manifest."""
    said = json.loads(manifest.read_text())
    del said["crc32"]
    said["files"][path.name] = manifests.size_and_checksum(path)
    manifest.write_text(json.dumps(said | {"crc32": manifests._checksum(said)}))


def classes(folder: str) -> None:
    """A class of the user's in ``client_state`` is refused, unless it is trusted or added."""
    engine = engine_of("AdaLomo", 1)
    engine.save_checkpoint(folder, tag="t", client_state={"mine": Mine()})
    with pytest.raises(
        REFUSALS, match=r"was not loaded.*test_deepspeed_tools\.Mine.*add_safe_globals"
    ):
        engine.load_checkpoint(folder, tag="t")
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    assert engine.load_checkpoint(folder, tag="t")[1]["mine"].value == 3
    del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
    torch.serialization.add_safe_globals([Mine])
    assert engine.load_checkpoint(folder, tag="t")[1]["mine"].value == 3


CASES = [(stage, dtype) for stage in STAGES for dtype in ("fp32", "bf16")]


@pytest.mark.parametrize("stage, dtype", params(CASES, [(0, "fp32"), (3, "bf16")]))
@worlds.on(1)
def test_plain_objects_of_users_are_loaded(tmp_path, stage, dtype):
    engine_of("AdaLomo", stage, dtype).save_checkpoint(tmp_path, tag="t", client_state=PLAIN)
    path, found = engine_of("AdaLomo", stage, dtype).load_checkpoint(tmp_path, tag="t")
    assert path is not None
    for key, value in PLAIN.items():
        assert repr(value) == repr(found[key]) and type(value) is type(found[key]), key


@pytest.mark.parametrize("stage", STAGES)
@worlds.on(1)
def test_how_to_take_over_weights_of_deepspeeds_adamw_is_said(tmp_path, stage):
    engine_of("AdamW", stage).save_checkpoint(tmp_path)
    ours = engine_of("AdaLomo", stage)
    before = whole(ours)
    with pytest.raises(REFUSALS, match="ds_ext.json is missing.*before deepspeed.initialize"):
        ours.load_checkpoint(tmp_path)
    assert same(before, whole(ours))


@pytest.mark.parametrize("stage", [0, 3])
@worlds.on(1)
def test_code_in_a_file_is_not_run(tmp_path, stage):
    engine_of("AdaLomo", stage).save_checkpoint(tmp_path, tag="good")
    other, files = engine_of("AdaLomo", stage), [*(tmp_path / "good").glob("*.pt")]
    assert any("model_states" in file.name for file in files)
    for file in files:
        bad = Path(shutil.copytree(file.parent, f"{tmp_path}/{file.name}.bad"))
        saved = torch.load(bad / file.name, weights_only=False)
        torch.save({**saved, "planted": Code(f"touch {tmp_path}/RUN")}, bad / file.name)
        describe_anew(bad / "ds_ext.json", bad / file.name)
        words = f"{file.name} was not loaded, because it may run code: posix.system."
        with pytest.raises(REFUSALS, match=re.escape(words)):
            other.load_checkpoint(tmp_path, tag=bad.name)
    assert not (tmp_path / "RUN").exists()


def test_how_to_load_a_class_of_ones_own_is_said(tmp_path):
    (ended,) = worlds.fresh(1, classes, str(tmp_path))
    assert ended.code == 0, ended.output
