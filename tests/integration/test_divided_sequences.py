"""accelerate's ``ParallelismConfig(sp_size=2)`` on two real ranks, against one process."""

from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedSequenceParallelConfig, DummyOptim, ParallelismConfig
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests import worlds
from tests.common.plain import mean_step
from tests.common.ranks import whole
from tests.common.updates import error

LR, VOCAB, LENGTH = 0.5, 31, 8
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
CONFIG |= {"zero_optimization": {"stage": 2}}
CONFIG |= {"optimizer": {"type": "ds_ext.LOMO", "params": {"lr": LR, "weight_decay": 0.0}}}


def make() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads))


def data() -> list[dict[str, torch.Tensor]]:
    """One sequence after another: the ranks of a sequence take them in this order."""
    made = torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(5))
    places = torch.arange(LENGTH)
    return [{"input_ids": x, "labels": x, "position_ids": places} for x in made]


@mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping)  # to which DeepSpeed writes
def train() -> dict[str, Any]:
    """Weights after training on two ranks, and what of each sequence was this one's."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    PartialState(cpu=True)
    attention = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    sizes = ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=attention)
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=sizes)
    model, loader = make(), DataLoader(data(), batch_size=1)
    optimizer = DummyOptim(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        target = batch.pop("shift_labels").flatten()
        logits = model(**{k: batch[k] for k in ("input_ids", "position_ids")}).logits
        loss = cross_entropy(logits.flatten(0, 1), target, ignore_index=-100, reduction="sum")
        accelerator.backward(loss / (LENGTH - 1))
        seen.append(batch["input_ids"].flatten().tolist())
    return {"after": whole(model.module), "seen": seen}


@pytest.mark.slow
@pytest.mark.supports("sequence parallelism (Ulysses)", stage=2, optimizer="LOMO")
def test_sequences_that_accelerate_divides_equal_one_process():
    model = make()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rows, sgd = data(), torch.optim.SGD(model.parameters(), lr=LR)
    ranks = worlds.once(2, train)
    # accelerate hands out rows of its own accord: what the two have seen is one after another
    halves = zip(*(rank["seen"] for rank in ranks), strict=True)
    for sequence in (torch.tensor([a + b]) for a, b in halves):
        assert any(torch.equal(sequence[0], row["input_ids"]) for row in rows)
        mean_step(sgd, [model(input_ids=sequence, labels=sequence).loss])
    for rank in ranks:
        named = dict(model.named_parameters())
        assert len(rank["seen"]) == len(rows)
        assert error(rank["after"], named, before) <= 1e-5
