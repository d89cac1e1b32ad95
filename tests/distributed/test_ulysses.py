"""Sequences that DeepSpeed's Ulysses divides over pairs of ranks, also for accelerate.

How such training is, beside one process, is in test_tensor_parallel.py.
"""

from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedSequenceParallelConfig, DummyOptim, ParallelismConfig
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequences
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests import worlds
from tests.common import engines
from tests.common.plain import mean_step, weights
from tests.common.ranks import whole
from tests.common.updates import error
from tests.integration.trainer_jobs import data
from tests.integration.trainer_jobs import model as llama

VOCAB, WIDTH, HEADS, LENGTH = 29, 24, 4, 10


class Attention(nn.Module):
    """Causal attention, [length, batch, heads, size] each -> the same."""

    def forward(self, q, k, v, *_):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


class Block(nn.Module):
    """One layer, whose attention sees the whole sequence, and all else what this rank has."""

    def __init__(self, is_divided: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 50)
        self.down = nn.Linear(50, VOCAB)
        # the ranks of a sequence are known when there is an engine
        self.attend = DistributedAttention(Attention(), None) if is_divided else Attention()

    def forward(self, tokens):  # [length, batch]
        h = self.embed(tokens)
        q, k, v = (
            x.unflatten(-1, (-1, WIDTH // HEADS)).contiguous() for x in self.qkv(h).chunk(3, -1)
        )
        h = h + self.out(self.attend(q, k, v, 1).flatten(2))
        return self.down(torch.tanh(self.up(h)))


def make(is_divided: bool = False) -> Block:
    torch.manual_seed(11)
    return Block(is_divided)


def loss_of(model, step: int, pair: int, part: slice) -> torch.Tensor:
    """What the tokens ``part`` of a pair's sequences add to their mean loss."""
    generator = torch.Generator().manual_seed(31 * step + pair)
    tokens = torch.randint(0, VOCAB, (LENGTH, 3), generator=generator)
    target = torch.randn(LENGTH, 3, VOCAB, generator=generator)
    return (model(tokens[part]) - target[part]).square().sum() / target.numel()


def initialized(config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    if sequences._SEQUENCE_PARALLEL_GROUP is None:
        sequences.initialize_sequence_parallel(2)
    engine, *_ = deepspeed.initialize(model=make(True), config=config, mpu=sequences)
    engine.module.attend.spg = groups._get_sequence_parallel_group()
    return engine


def loss_here(engine: deepspeed.DeepSpeedEngine, step: int) -> torch.Tensor:
    pair, place = divmod(dist.get_rank(), 2)
    half = slice(place * LENGTH // 2, (place + 1) * LENGTH // 2)
    return loss_of(engine, step, pair, half)


@worlds.on(4)
def test_a_gradient_that_is_not_finite_on_one_rank_of_a_sequence_is_skipped_on_all():
    engine = initialized(engines.config(1, optimizer={"type": "LOMO", "params": {"lr": 1.0}}))
    own = dict(engine.module.named_parameters())
    before = {n: p.detach().clone() for n, p in own.items()}
    if dist.get_rank() == dist.get_world_size() - 1:
        own["up.weight"].register_hook(lambda g: g / 0)
    engine.backward(loss_here(engine, 0))
    engine.step()
    assert {n for n, p in own.items() if torch.equal(p, before[n])} == {"up.weight"}
    assert all(p.isfinite().all() for p in own.values())


@worlds.on(4)
def test_sizes_and_groups_of_sequences_that_do_not_fit_are_refused_on_every_rank():
    sequences.initialize_sequence_parallel(2)
    size, mesh = {"sequence_parallel_size": 2}, {"data_parallel_size": 2}
    tensor = {"tensor_parallel": {"autotp_size": 2}}
    needs_mpu = "^sequence_parallel_size = .*initialize_sequence_parallel.*as mpu"
    left = "keeps the mpu of an earlier engine"
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdaLomo"}}
    for words, sizes, given in (
        (needs_mpu, size, {}),
        (needs_mpu, size | mesh, {}),
        (needs_mpu, {"sequence_parallel_size": 4}, {"mpu": sequences}),
        ("together with tensor_parallel.autotp_size = 2", tensor | size, {"mpu": sequences}),
        ("autotp_size = 2: .* The mpu sets sequence_par", tensor, {"mpu": sequences}),
        (left, {}, {}),
        ("would not sum the gradients of the ranks that share", {}, {"mesh_param": (2, 2)}),
    ):
        groups.mpu = sequences if words == left else None
        with pytest.raises(ValueError, match=words):
            deepspeed.initialize(model=make(True), config=config | sizes, **given)


# accelerate's ``ParallelismConfig(sp_size=2)``.
LR = 0.5
CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
CONFIG |= {"zero_optimization": {"stage": 2}}
CONFIG |= {"optimizer": {"type": "ds_ext.LOMO", "params": {"lr": LR, "weight_decay": 0.0}}}


def rows() -> list[dict[str, torch.Tensor]]:
    """One sequence after another: the ranks of a sequence take them in this order."""
    places = torch.arange(16)
    return [row | {"labels": row["input_ids"], "position_ids": places} for row in data()[:4]]


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
    model, loader = llama(), DataLoader(rows(), batch_size=1)
    optimizer = DummyOptim(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        target = batch.pop("shift_labels").flatten()
        logits = model(**{k: batch[k] for k in ("input_ids", "position_ids")}).logits
        loss = F.cross_entropy(logits.flatten(0, 1), target, ignore_index=-100, reduction="sum")
        accelerator.backward(loss / 15)
        seen.append(batch["input_ids"].flatten().tolist())
    return {"after": whole(model.module), "seen": seen}


@pytest.mark.slow
@pytest.mark.supports("sequence parallelism (Ulysses)", stage=2, optimizer="LOMO")
def test_sequences_that_accelerate_divides_equal_one_process():
    model = llama()
    before = weights(model)
    given, sgd = rows(), torch.optim.SGD(model.parameters(), lr=LR)
    ranks = worlds.once(2, train)
    # accelerate hands out rows of its own accord: what the two have seen is one after another
    halves = zip(*(rank["seen"] for rank in ranks), strict=True)
    for sequence in (torch.tensor([a + b]) for a, b in halves):
        assert any(torch.equal(sequence[0], row["input_ids"]) for row in given)
        mean_step(sgd, [model(input_ids=sequence, labels=sequence).loss])
    for rank in ranks:
        named = dict(model.named_parameters())
        assert len(rank["seen"]) == len(given)
        assert error(rank["after"], named, before) <= 1e-5
