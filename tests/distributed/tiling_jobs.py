"""Jobs of test_tiling.py: models whose MLP is DeepSpeed's tiled function."""

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel import ulysses_sp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests.common import engines

STEPS, VOCAB, WIDTH, LENGTH, TILES = 3, 11, 8, 6, 3


@dataclass(frozen=True)
class Case:
    stage: int | None
    max_norm: float = 0.0
    policy: str = "fused"
    tied: bool = False
    accumulation: int = 1
    reentrant: bool | None = None  # None: no checkpointing
    calls_modules: bool = True


class Model(nn.Module):
    """A language model; not tiled where ``tiled`` is False, which is the reference."""

    def __init__(self, case: Case, tiled: bool) -> None:
        super().__init__()
        self.case = case
        self.tiled = tiled
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight

    def mlp(self, x: Tensor) -> Tensor:
        if self.case.calls_modules:
            return self.down(torch.tanh(self.up(x)))
        return F.linear(torch.tanh(F.linear(x, self.up.weight)), self.down.weight)

    def block(self, x: Tensor) -> Tensor:
        if not self.tiled:
            return x + self.mlp(x)
        weights = [self.up.weight, self.down.weight]
        return x + ulysses_sp.TiledMLP.apply(Model.mlp, self, x, TILES, weights)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.case.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.case.reentrant)

    def cross_entropy(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), targets)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(self.hidden(tokens).flatten(0, 1), targets.flatten())


def make(case: Case, tiled: bool) -> Model:
    torch.manual_seed(4)
    return Model(case, tiled)


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    return model(*batch(number, rank))


def train(case: Case) -> dict[str, Any]:
    model = make(case, tiled=True)
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    more = {"gradient_clipping": case.max_norm, "gradient_accumulation_steps": case.accumulation}
    engine = engines.start(model, optimizer, case.stage, case.policy, **more)
    return engines.trained(engine, loss_of, STEPS, case.accumulation)
