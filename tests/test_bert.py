"""The nine BERT classes × stages 0–3 × all optimizers, on two ranks, against one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_ext.optimizer import OPTIMIZERS
from tests.bert_worker import CLASSES, STAGES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    out = tmp_path_factory.mktemp("bert") / "errors.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "-m", "tests.bert_worker", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.supports("nine BERT classes", stage="stage", optimizer="rule")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("name", CLASSES)
def test_bert_equals_one_process(errors, name, rule, stage):
    error = errors[name, rule, stage]
    assert isinstance(error, float), error
    assert error <= 1e-5
