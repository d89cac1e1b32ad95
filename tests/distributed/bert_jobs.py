"""The nine BERT classes under every stage with every optimizer, and the same in one process."""

import functools

import deepspeed
import torch
import torch.distributed as dist
import transformers
from transformers import BertConfig

from tests.common import by_role, updates
from tests.common.hypers import NEEDED, changed
from tests.common.plain import mean_step
from tests.common.ranks import whole

CLASSES = (
    "BertModel",
    "BertForPreTraining",
    "BertLMHeadModel",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
    "BertForQuestionAnswering",
)
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


def loss_of(model, name: str, step: int, rank: int) -> torch.Tensor:
    """A loss with full-rank gradients, of this rank's own tokens."""
    generator = torch.Generator().manual_seed(97 * step + rank)
    shape = (2, 3, 7) if name == "BertForMultipleChoice" else (2, 7)
    tokens = torch.randint(0, 67, shape, generator=generator)
    outputs = model(input_ids=tokens, use_cache=False).to_tuple()
    targets = [torch.randn(o.shape, generator=generator) for o in outputs]
    return sum((o - t).square().mean() for o, t in zip(outputs, targets, strict=True))


def optimizer_of(rule: str, model: torch.nn.Module):
    return by_role.made(rule, model, HYPERS[rule])


@functools.cache
def reference(name: str, rule: str, world: int) -> tuple[dict, dict]:
    """Weights before and after, in one process with all ranks' data."""
    model = make(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = optimizer_of(rule, model)
    for step in range(STEPS):
        mean_step(optimizer, [loss_of(model, name, step, rank) for rank in range(world)])
    return before, {n: p.detach() for n, p in model.named_parameters()}


def sharded(name: str, rule: str, stage: int) -> dict[str, torch.Tensor]:
    """Weights after the same training on these ranks."""
    model = make(name)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 700,
            "stage3_param_persistence_threshold": 20,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(rule, model), config=config
    )
    for step in range(STEPS):
        engine.backward(loss_of(engine, name, step, dist.get_rank()))
        engine.step()
    after = whole(model)
    engine.destroy()
    return after


def error(name: str, rule: str, after: dict, world: int) -> float:
    """‖difference‖ / ‖update‖ over the model, without the key biases, whose gradient is 0: what
    they move by is rounding."""
    before, expected = reference(name, rule, world)
    counted = {n: p for n, p in expected.items() if not n.endswith("attention.self.key.bias")}
    return updates.error(after, counted, before)
