"""Jobs of test_tiling.py: models whose MLP is DeepSpeed's tiled function."""

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import ulysses_sp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests.distributed.exact_clipping_jobs import config
from tests.distributed.training_jobs import whole

STEPS, VOCAB, WIDTH, LENGTH, TILES = 3, 11, 8, 6, 3


@dataclass(frozen=True)
class Case:
    stage: int | None
    max_norm: float = 0.0
    policy: str = "fused"
    tied: bool = False
    accumulation: int = 1
    reentrant: bool | None = None  # None: no checkpointing


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
        return self.down(torch.tanh(self.up(x)))

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


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    found: Tensor = model(*batch(step, rank))
    return found


def train(case: Case) -> dict[str, Any]:
    model = make(case, tiled=True)
    before = whole(model)
    optimizer = ds_ext.LOMO(model.parameters(), lr=0.5)
    if case.stage is None:
        fused = ds_ext.fuse_into_backward(
            model,
            optimizer,
            bucket_size=100,
            max_grad_norm=case.max_norm,
            gradient_policy=case.policy,
        )
        engine, backward, end_step = model, fused.backward, optimizer.step
    else:
        made = config(case.stage) | {
            "gradient_clipping": case.max_norm,
            "gradient_accumulation_steps": case.accumulation,
            "ds_ext": {"gradient_policy": case.policy},
        }
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
        backward, end_step = engine.backward, engine.step
    for step in range(STEPS * case.accumulation):
        loss = loss_of(engine, step, dist.get_rank())
        backward(loss)
        end_step()
    return {"before": before, "after": whole(model)}
