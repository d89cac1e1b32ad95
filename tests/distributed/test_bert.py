"""The nine BERT classes by all optimizers, at stages 0 to 3, on two ranks, against one process."""

import pytest

from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common.choose import params
from tests.common.hypers import CLOSE
from tests.distributed import bert
from tests.distributed.bert import CLASSES, STAGES

# Every rule steps every class, and is at every stage with some; of these, one in seven is quick: so
# each rule and each class comes up.
ALL = [
    (name, rule, STAGES[(i + j) % len(STAGES)])
    for j, rule in enumerate(REGISTRY)
    for i, name in enumerate(CLASSES)
]
QUICK = ALL[::7]


@pytest.mark.supports("nine BERT classes", stage="stage", optimizer="rule")
@pytest.mark.parametrize("name, rule, stage", params(ALL, QUICK))
def test_bert_equals_one_process(name, rule, stage):
    after = worlds.once(2, bert.sharded, name, rule, stage)[0]
    assert bert.error(name, rule, after, 2) <= CLOSE.get(rule, 1e-5)
