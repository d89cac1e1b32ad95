"""DeepSpeed's tiled MLP trains as one that is not tiled does; its tiled loss is refused."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepspeed.runtime.sequence_parallel import ulysses_sp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_ext
from tests import worlds
from tests.common import engines
from tests.common.choose import params
from tests.common.updates import check_each

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


CLIP = 0.3
CASES = [
    *(Case(stage, max_norm) for stage in (None, 0, 2, 3) for max_norm in (0.0, CLIP)),
    Case(None, CLIP, tied=True),
    *(Case(stage, max_norm, calls_modules=False) for stage in (None, 2) for max_norm in (0, CLIP)),
    Case(2, tied=True),
    Case(3, CLIP, tied=True),
    Case(2, CLIP, "sharded", accumulation=2),
    Case(3, 0.0, "sharded", tied=True, accumulation=2),
    *(Case(stage, CLIP, reentrant=reentrant) for stage in (2, 3) for reentrant in (True, False)),
]
QUICK = [(case,) for case in CASES[::5]]


@pytest.mark.parametrize("case", params([(case,) for case in CASES], QUICK), ids=str)
def test_tiled_functions_train_exactly(case):
    plain = make(case, tiled=False)
    alone = engines.alone(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.5),
        loss_of,
        STEPS,
        max_norm=case.max_norm,
        accumulation=case.accumulation,
    )
    assert min(alone.norms) > 1.1 * case.max_norm  # or it would show nothing
    for got in worlds.run(2, train, case):
        check_each(got["after"], alone.after, alone.before)


@pytest.mark.parametrize("is_module", [True, False])
def test_the_tiled_loss_is_refused(is_module):
    model = nn.Linear(4, 4)
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.5))
    x, y = torch.ones(1, 4, 4, requires_grad=True), torch.zeros(1, 4, dtype=torch.long)

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y)

    before = model.weight.clone()
    with pytest.raises(RuntimeError, match='TiledFusedLogitsLoss computes .*"chunked_loss": true'):
        head = model if is_module else model.forward
        ulysses_sp.TiledFusedLogitsLoss.apply(loss, head, x, y, None, 2, [model.weight], "mean")
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_a_gradient_penalty_is_refused():
    model = make(Case(None), tiled=True)
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.5))
    loss = model(*batch(0, 0))
    with pytest.raises(RuntimeError, match="their gradients cannot be differentiated"):
        torch.autograd.grad(loss, model.embed.weight, create_graph=True)


@pytest.mark.parametrize("tiles", [1, 3])
def test_tiles_outside_of_the_models_forward_pass_are_exact(tiles):
    model, x = nn.Linear(4, 4), torch.randn(1, 6, 4, requires_grad=True)
    alone = copy.deepcopy(model)
    lomo = ds_ext.LOMO(model.parameters(), lr=0.5)
    ds_ext.fuse_into_backward(model, lomo, bucket_size=1)
    given = x, tiles, [*model.parameters()]
    ulysses_sp.TiledMLP.apply(lambda module, x: module(x), model, *given).square().mean().backward()
    lomo.step()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.5)
    alone(x).square().mean().backward()
    sgd.step()
    for own, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, expected)
