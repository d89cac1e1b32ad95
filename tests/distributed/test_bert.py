"""The nine BERT classes × stages 0–3 × all optimizers, on two ranks, against one process."""

import itertools

import pytest

from tests import worlds
from tests.common.choose import params, spread
from tests.common.hypers import FOR_ALL
from tests.distributed import bert
from tests.distributed.bert import CLASSES, STAGES

ALL = list(itertools.product(CLASSES, FOR_ALL, STAGES))
# Each class twice, at each stage several of them; rules take turns.
PAIRS = [(name, stage) for i, name in enumerate(CLASSES) for stage in (i % 4, (i + 2) % 4)]
QUICK = [(name, rule, stage) for rule, name, stage in spread(FOR_ALL, PAIRS)]


@pytest.mark.supports("nine BERT classes", stage="stage", optimizer="rule")
@pytest.mark.parametrize("name, rule, stage", params(ALL, QUICK))
def test_bert_equals_one_process(name, rule, stage):
    after = worlds.once(2, bert.sharded, name, rule, stage)[0]
    # codes of 8 bits jump where gradients differ in their last bits
    assert bert.error(name, rule, after, 2) <= (1e-2 if rule == "flashadamw" else 1e-5)
