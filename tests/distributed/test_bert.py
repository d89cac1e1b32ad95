"""The nine BERT classes by all optimizers, at stages 0 to 3, on two ranks, against one process."""

from itertools import cycle

import pytest

from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common.choose import params
from tests.common.hypers import CLOSE
from tests.distributed import bert_jobs
from tests.distributed.bert_jobs import CLASSES, STAGES

# Every rule at every stage, with the classes in turn; of these, each class is quick once.
PAIRS = [(rule, stage) for rule in REGISTRY for stage in STAGES]
ALL = [(name, *pair) for name, pair in zip(cycle(CLASSES), PAIRS)]  # noqa: B905
QUICK = ALL[:: len(STAGES) + 1][: len(CLASSES)]


@pytest.mark.supports("the nine BERT model classes", stage="stage", optimizer="rule")
@pytest.mark.parametrize("name, rule, stage", params(ALL, QUICK))
def test_bert_equals_one_process(name, rule, stage):
    after = worlds.once(2, bert_jobs.sharded, name, rule, stage)[0]
    assert bert_jobs.error(name, rule, after) <= CLOSE.get(rule, 1e-5)
