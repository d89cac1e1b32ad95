"""A small bf16 model whose matrices are large enough for 8 bits, and its data."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_ext.ops import int8

WIDTH, VOCAB = 128, 512


class Model(nn.Module):
    """Two layers between an embedding and a head that share a weight; ``still`` is frozen."""

    def __init__(self, checkpointing=None):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH, bias=False) for _ in range(2))
        self.still = nn.Linear(WIDTH, 4 * WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def layer(self, h, i):
        inner = F.silu(self.up[i](self.norm(h))) * self.still(h)
        return h + self.down[i](inner)

    def forward(self, tokens):
        h = self.embed(tokens)
        for i in range(2):
            if self.checkpointing is None:
                h = self.layer(h, i)
            else:
                h = checkpoint(self.layer, h, i, use_reentrant=self.checkpointing == "reentrant")
        return F.cross_entropy(self.head(h).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


STORED = ["embed.weight", *(f"{name}.{i}.weight" for name in ("up", "down") for i in range(2))]


def made(checkpointing=None, seed=1):
    torch.manual_seed(seed)
    model = Model(checkpointing).bfloat16()
    with torch.no_grad():  # values that 8 bits can hold
        for name in STORED:
            param = model.get_parameter(name)
            param.copy_(int8.Int8Weight(param).values())
    return model


def batch(step, rank=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(VOCAB, (2, 16), generator=generator)
