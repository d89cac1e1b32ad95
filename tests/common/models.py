"""A small model with every shape and habit that makes sharding hard, and its data."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH = 17, 12, 9


class Zoo(nn.Module):
    """A language model over ``VOCAB`` tokens.

    Its embedding is tied to its head and fed by tokens (no gradient); ``shared`` is used in two
    segments that can be checkpointed; ``frozen`` and ``unused`` get no gradient, and ``odd`` only
    where ``step`` is odd. ``tensors`` adds parameters of 0, 3 and 4 dimensions.
    """

    def __init__(
        self, checkpointing: str | None = None, tensors: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.dropout = dropout
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(5, 3)
        self.odd = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.col = nn.Parameter(torch.randn(WIDTH, 1))
        self.pair = nn.Parameter(torch.randn(2))
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.offsets = nn.Parameter(torch.randn(LENGTH, WIDTH))
        if tensors:
            self.conv1 = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
            self.conv2 = nn.Conv2d(1, 2, (3, 5), padding=(1, 2), bias=False)
            self.gain = nn.Parameter(torch.tensor(0.7))
        self.tensors = tensors

    def first(self, h):
        h = F.dropout(h, self.dropout)
        return h + torch.tanh(self.down(torch.tanh(self.up(self.shared(h)))))

    def second(self, h):
        h = h + torch.tanh(self.shared(h)) * self.frozen(h)
        if self.tensors:
            h = h + torch.tanh(self.conv1(h.transpose(1, 2))).transpose(1, 2)
            h = h + self.conv2(torch.tanh(h).unsqueeze(1)).prod(1)
        return h

    def segment(self, function, h):
        if self.checkpointing is None:
            return function(h)
        if self.checkpointing == "deepspeed":
            import deepspeed  # which most uses of this model do without

            return deepspeed.checkpointing.checkpoint(function, h)
        return checkpoint(function, h, use_reentrant=self.checkpointing == "reentrant")

    def mixed(self, h):
        return h.mean(0, keepdim=True)

    def forward(self, tokens, step=0):
        h = self.embed(tokens) + self.row
        # These two gradients are views of one, which the mean still waits to read.
        places = self.positions.unsqueeze(0), self.offsets.unsqueeze(0)
        h = h + torch.tanh(self.mixed(h) * 1.5 + places[0] + places[1])
        h = self.segment(self.second, self.segment(self.first, h))
        if step % 2:
            h = h + self.odd(h)
        h = self.norm(h) + (h @ self.col) * self.pair.sum() * 0.1
        if self.tensors:
            h = h * self.gain
        logits = F.linear(h[:, :-1], self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Rows(Zoo):
    """Its rows do not see each other, so that they may be divided among any number of ranks."""

    def mixed(self, h):
        return h


class Given(nn.Module):
    """Its loss is sum(p · g), so that the gradient of p is the g that it is called with."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(p.detach()) for p in params)  # same memory

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * g).sum() for p, g in zip(self.weights, gradients, strict=True))


def layers(*widths: int, seed: int = 0) -> nn.Sequential:
    """Linear layers of these widths with tanh between them."""
    torch.manual_seed(seed)
    pairs = [(nn.Linear(*sizes), nn.Tanh()) for sizes in zip(widths[:-1], widths[1:], strict=True)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


def batch(step: int, world: int) -> torch.Tensor:
    """Tokens of one step for every rank -> [world, 3, 9]; each rank's differ."""
    generator = torch.Generator().manual_seed(1000 * world + step)
    return torch.randint(0, VOCAB, (world, 3, LENGTH), generator=generator)


def make(checkpointing: str | None = None, tensors: bool = True, dropout: float = 0.0) -> Zoo:
    torch.manual_seed(7)
    return Zoo(checkpointing, tensors, dropout)
