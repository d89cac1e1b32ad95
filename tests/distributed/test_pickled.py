"""Checkpoints load as they were saved, and run no code that someone put into them."""

import re

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from ds_ext.engine import safe_unpickling
from tests import worlds
from tests.common.choose import params
from tests.distributed import pickled_jobs as jobs

CASES = [
    (kind, stage, dtype)
    for kind in ("AdamW", "AdaLomo")
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16")
]
QUICK = [("AdamW", 3, "fp32"), ("AdamW", 1, "bf16"), ("AdaLomo", 0, "fp32"), ("AdaLomo", 2, "bf16")]


@pytest.mark.parametrize("kind, stage, dtype", params(CASES, QUICK))
def test_plain_objects_of_users_and_what_deepspeed_saves_are_loaded(tmp_path, kind, stage, dtype):
    assert worlds.run(1, jobs.loads, str(tmp_path), kind, stage, dtype) == [[]]


@pytest.mark.parametrize(
    "kind, stage", [("AdamW", 3), ("AdamW", 1), ("AdaLomo", 0), ("AdaLomo", 3)]
)
def test_code_in_a_file_is_not_run(tmp_path, kind, stage):
    told = worlds.run(1, jobs.planted, str(tmp_path), kind, stage)[0]
    assert not (tmp_path / "RUN").exists()
    assert any("model_states" in file for file in told)
    for file, text in told.items():
        found = f"{file} was not loaded, because it may run code: posix.system."
        assert found in text, text


def test_how_to_load_a_class_of_ones_own_is_said(tmp_path):
    told = worlds.fresh(1, jobs.classes, str(tmp_path))[0].result
    assert re.search(
        r"model_states.pt was not loaded.*pickled_jobs\.Mine.*add_safe_globals", told[0]
    )
    assert told[1:] == ["3", "3"]


@pytest.mark.parametrize("scaler", [LossScaler(4.0), DynamicLossScaler(2.0**16, 2, 3, 1, 2, False)])
def test_deepspeeds_loss_scalers_are_loaded(tmp_path, scaler):
    torch.save({"loss_scaler": scaler}, tmp_path / "x.pt")
    found = safe_unpickling.load(tmp_path / "x.pt")["loss_scaler"]
    assert type(found) is type(scaler) and vars(found) == vars(scaler)
