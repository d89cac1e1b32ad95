"""Four ranks, sequences divided over two of them by DeepSpeed's Ulysses, two such pairs."""

import functools
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequences
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import nn
from torch.nn import functional as F

from tests.common import by_role

VOCAB, WIDTH, HEADS, LENGTH, STEPS = 29, 24, 4, 10, 6
CLIPS = {"lomo": 0.0}  # 0: none; the others are clipped
# A gradient that is too large by a factor changes LOMO's update, but none of the others'.
HYPERS: dict[str, dict[str, Any]] = {
    "lomo": {"lr": 1.0},
    "adalomo": {"lr": 5e-3},
    "came": {"lr": 5e-4},
    "adamw": {"lr": 5e-3},
    "sinkgd": {"lr": 0.05},
}
CASES = [(rule, stage) for rule in ("lomo", "adalomo", "came") for stage in (1, 2, 3)]
CASES += [("adamw", 2), ("sinkgd", 3)]


class Attention(nn.Module):
    """Causal attention, [length, batch, heads, size] each -> the same."""

    def forward(self, q, k, v, *_):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


class Block(nn.Module):
    """One layer, whose attention sees the whole sequence, and all else what this rank has."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 50)
        self.down = nn.Linear(50, VOCAB)
        self.attend = Attention() if group is None else DistributedAttention(Attention(), group)

    def forward(self, tokens):  # [length, batch]
        h = self.embed(tokens)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).contiguous() for x in self.qkv(h).chunk(3, -1))
        h = h + self.out(self.attend(q, k, v, 1).flatten(2))
        return self.down(torch.tanh(self.up(h)))


def make(group: Any = None) -> Block:
    torch.manual_seed(11)
    return Block(group)


def loss_of(model, step: int, pair: int, part: slice) -> torch.Tensor:
    """What the tokens ``part`` of a pair's sequences add to their mean loss."""
    generator = torch.Generator().manual_seed(31 * step + pair)
    tokens = torch.randint(0, VOCAB, (LENGTH, 3), generator=generator)
    target = torch.randn(LENGTH, 3, VOCAB, generator=generator)
    return (model(tokens[part]) - target[part]).square().sum() / target.numel()


def clip_of(rule: str) -> float:
    """The norm that gradients are clipped to, 0 for none."""
    return CLIPS.get(rule, 0.05)


@functools.cache
def whole(rule: str, streams: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
    """Weights before and after in one process that has whole sequences, and gradients' norms."""
    model = make()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    params = list(model.parameters())
    names = {p: n for n, p in model.named_parameters()}
    optimizer_of = by_role.optimizer(names, r"(qkv|out|up|down)\.weight", dict(streams))
    optimizer = optimizer_of(rule, [{"params": params, "weight_decay": 0.0}], HYPERS[rule])
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, step, pair, slice(None)) for pair in range(2)) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, clip_of(rule) or float("inf"))
        norms.append(float(norm))
        optimizer.step()
    after = {n: p.detach() for n, p in model.named_parameters()}
    return {"before": before, "after": after, "norms": norms}


def train(rule: str, stage: int) -> dict[str, Any]:
    """Weights after the same training on these ranks, and gradients' norms."""
    params = HYPERS[rule] | {"weight_decay": 0.0}
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": clip_of(rule),
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1500},
        "optimizer": {"type": f"ds_ext.{rule}", "params": params},
    }
    sequences.initialize_sequence_parallel(2)
    group = sequences.get_sequence_parallel_group()
    engine, *_ = deepspeed.initialize(model=make(group), config=config, mpu=sequences)
    pair, place = divmod(dist.get_rank(), 2)
    half = slice(place * LENGTH // 2, (place + 1) * LENGTH // 2)
    norms = []
    for step in range(STEPS):
        engine.backward(loss_of(engine, step, pair, half))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert groups._get_sequence_parallel_world_size() == 2
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        after = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    names = {p: n for n, p in engine.module.named_parameters()}
    streams = tuple(by_role.streams_of(engine.optimizer, names).items())
    engine.destroy()
    return {"after": after, "norms": norms, "streams": streams}


def by_config() -> str:
    """What is said where DeepSpeed is told of it by the config alone."""
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "data_parallel_size": 1,
        "sequence_parallel_size": 2,
        "optimizer": {"type": "AdaLomo"},
    }
    try:
        deepspeed.initialize(model=make(), config=config)
    except ValueError as error:
        return str(error)
    return "nothing"
