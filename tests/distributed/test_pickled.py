"""Checkpoints load as they were saved, and run no code that someone put into them."""

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
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

import ds_ext
from ds_ext.checkpoint import manifests
from ds_ext.engine import safe_unpickling
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.ranks import REFUSALS

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
    """A class of the user's."""

    value = 3


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def engine_of(kind: str, stage: int, dtype: str) -> deepspeed.DeepSpeedEngine:
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
    engine = engine_of("AdaLomo", 1, "fp32")
    engine.save_checkpoint(folder, tag="t", client_state={"mine": Mine()})
    with pytest.raises(REFUSALS, match=r"was not loaded.*test_pickled\.Mine.*add_safe_globals"):
        engine.load_checkpoint(folder, tag="t")
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    assert engine.load_checkpoint(folder, tag="t")[1]["mine"].value == 3
    del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
    torch.serialization.add_safe_globals([Mine])
    assert engine.load_checkpoint(folder, tag="t")[1]["mine"].value == 3


CASES = [
    (kind, stage, dtype)
    for kind in ("AdamW", "AdaLomo")
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16")
]
QUICK = [("AdamW", 3, "fp32"), ("AdamW", 1, "bf16"), ("AdaLomo", 0, "fp32"), ("AdaLomo", 2, "bf16")]


@pytest.mark.parametrize("kind, stage, dtype", params(CASES, QUICK))
@worlds.on(1)
def test_plain_objects_of_users_and_what_deepspeed_saves_are_loaded(tmp_path, kind, stage, dtype):
    """What one kind of optimizer saves with ``PLAIN`` is loaded by ours."""
    engine_of(kind, stage, dtype).save_checkpoint(tmp_path, tag="t", client_state=PLAIN)
    path, found = engine_of("AdaLomo", stage, dtype).load_checkpoint(tmp_path, tag="t")
    assert path is not None
    for key, value in PLAIN.items():
        assert repr(value) == repr(found[key]) and type(value) is type(found[key]), key


@pytest.mark.parametrize(
    "kind, stage", [("AdamW", 3), ("AdamW", 1), ("AdaLomo", 0), ("AdaLomo", 3)]
)
@worlds.on(1)
def test_code_in_a_file_is_not_run(tmp_path, kind, stage):
    """Code put into each file in turn is not run, and the file is named."""
    engine_of(kind, stage, "fp32").save_checkpoint(tmp_path, tag="good")
    other, files = engine_of("AdaLomo", stage, "fp32"), [*(tmp_path / "good").glob("*.pt")]
    assert any("model_states" in file.name for file in files)
    for file in files:
        bad = Path(shutil.copytree(file.parent, f"{tmp_path}/{file.name}.bad"))
        saved = torch.load(bad / file.name, weights_only=False)
        torch.save({**saved, "planted": Code(f"touch {tmp_path}/RUN")}, bad / file.name)
        if (manifest := bad / "ds_ext.json").exists():
            describe_anew(manifest, bad / file.name)
        words = f"{file.name} was not loaded, because it may run code: posix.system."
        with pytest.raises(REFUSALS, match=re.escape(words)):
            other.load_checkpoint(tmp_path, tag=bad.name)
    assert not (tmp_path / "RUN").exists()


def test_how_to_load_a_class_of_ones_own_is_said(tmp_path):
    (ended,) = worlds.fresh(1, classes, str(tmp_path))
    assert ended.code == 0, ended.output


@pytest.mark.parametrize("scaler", [LossScaler(4.0), DynamicLossScaler(2.0**16, 2, 3, 1, 2, False)])
def test_deepspeeds_loss_scalers_are_loaded(tmp_path, scaler):
    torch.save({"loss_scaler": scaler}, tmp_path / "x.pt")
    found = safe_unpickling.load(tmp_path / "x.pt")["loss_scaler"]
    assert type(found) is type(scaler) and vars(found) == vars(scaler)
