"""A model whose sequences are divided over pairs of ranks by DeepSpeed's Ulysses."""

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequences
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import nn
from torch.nn import functional as F

from tests.common import engines

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
    """An engine of two ranks for each sequence."""
    if sequences._SEQUENCE_PARALLEL_GROUP is None:
        sequences.initialize_sequence_parallel(2)
    engine, *_ = deepspeed.initialize(model=make(True), config=config, mpu=sequences)
    engine.module.attend.spg = groups._get_sequence_parallel_group()
    return engine


def loss_here(engine: deepspeed.DeepSpeedEngine, step: int) -> torch.Tensor:
    """What this rank's half of its sequences adds to their loss."""
    pair, place = divmod(dist.get_rank(), 2)
    half = slice(place * LENGTH // 2, (place + 1) * LENGTH // 2)
    return loss_of(engine, step, pair, half)


def not_finite() -> None:
    """A gradient that is not finite on the last rank alone is skipped on all."""
    engine = initialized(engines.config(1, optimizer={"type": "LOMO", "params": {"lr": 1.0}}))
    own = dict(engine.module.named_parameters())
    before = {n: p.detach().clone() for n, p in own.items()}
    if dist.get_rank() == dist.get_world_size() - 1:
        own["up.weight"].register_hook(lambda g: g / 0)
    engine.backward(loss_here(engine, 0))
    engine.step()
    assert {n for n, p in own.items() if torch.equal(p, before[n])} == {"up.weight"}
    assert all(p.isfinite().all() for p in own.values())


def refusals() -> None:
    """Sizes and groups that do not fit are refused."""
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
