"""The nine BERT classes × stages 0–3 × all optimizers, on two ranks, against one process."""

from pathlib import Path

import pytest
import torch

from ds_ext.optimizer import OPTIMIZERS
from tests.common import apart
from tests.distributed.bert_worker import CLASSES, STAGES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    out = tmp_path_factory.mktemp("bert") / "errors.pt"
    apart.python(*apart.ranks(2), "-m", "tests.distributed.bert_worker", str(out), timeout=900)
    return torch.load(out)


@pytest.mark.supports("nine BERT classes", stage="stage", optimizer="rule")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("name", CLASSES)
def test_bert_equals_one_process(errors, name, rule, stage):
    error = errors[name, rule, stage]
    assert isinstance(error, float), error
    assert error <= 1e-5
