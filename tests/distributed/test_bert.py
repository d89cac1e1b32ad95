"""The nine BERT classes by all optimizers, at stages 0 to 3, on two ranks, against one process."""

import functools
from itertools import cycle

import pytest
import torch
import transformers
from transformers import BertConfig

from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common import by_role, engines, updates
from tests.common.choose import params
from tests.common.hypers import CLOSE, NEEDED, changed

CLASSES = ("BertModel", "BertForPreTraining", "BertLMHeadModel", "BertForMaskedLM")
CLASSES += ("BertForSequenceClassification", "BertForTokenClassification")
CLASSES += ("BertForNextSentencePrediction", "BertForMultipleChoice", "BertForQuestionAnswering")
STAGES = range(4)
STEPS = 3
HYPERS = changed(NEEDED, galoreadamw={"rank": 4, "update_proj_gap": 2, "nbits": 32})


def make(name: str) -> torch.nn.Module:
    """A small BERT: its vocabulary divides by nothing, its decoder is tied to its embedding."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=67,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=26,
        max_position_embeddings=9,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        is_decoder=name == "BertLMHeadModel",
    )
    return getattr(transformers, name)(config)


def loss_of(model, number: int, rank: int, name: str) -> torch.Tensor:
    """A loss with full-rank gradients, of this rank's own tokens."""
    generator = torch.Generator().manual_seed(97 * number + rank)
    shape = (2, 3, 7) if name == "BertForMultipleChoice" else (2, 7)
    tokens = torch.randint(0, 67, shape, generator=generator)
    outputs = model(input_ids=tokens, use_cache=False).to_tuple()
    targets = [torch.randn(o.shape, generator=generator) for o in outputs]
    return sum((o - t).square().mean() for o, t in zip(outputs, targets, strict=True))


@functools.cache
def alone(name: str, rule: str) -> engines.Alone:
    model = make(name)
    loss = functools.partial(loss_of, name=name)
    return engines.alone(model, by_role.made(rule, model, HYPERS[rule]), loss, STEPS)


def sharded(name: str, rule: str, stage: int) -> dict[str, torch.Tensor]:
    model = make(name)
    optimizer = by_role.made(rule, model, HYPERS[rule])
    engine = engines.start(model, optimizer, stage, zero={"reduce_bucket_size": 700})
    after = engines.trained(engine, functools.partial(loss_of, name=name), STEPS)["after"]
    engine.destroy()
    return after


def error(name: str, rule: str, after: dict[str, torch.Tensor]) -> float:
    """‖difference‖ / ‖update‖ over the model, without the key biases, whose gradient is 0: what
    they move by is rounding."""
    before, expected, _ = alone(name, rule)
    counted = {n: p for n, p in expected.items() if not n.endswith("attention.self.key.bias")}
    return updates.error(after, counted, before)


# Every rule at every stage, with the classes in turn.
PAIRS = [(rule, stage) for rule in REGISTRY for stage in STAGES]
ALL = [(name, *pair) for name, pair in zip(cycle(CLASSES), PAIRS)]  # noqa: B905
QUICK = [ALL[i] for i in (0, 5, 15)]


@pytest.mark.supports("the nine BERT model classes", stage="stage", optimizer="rule")
@pytest.mark.parametrize("name, rule, stage", params(ALL, QUICK))
def test_bert_equals_one_process(name, rule, stage):
    after = worlds.once(2, sharded, name, rule, stage)[0]
    assert error(name, rule, after) <= CLOSE.get(rule, 1e-5)
