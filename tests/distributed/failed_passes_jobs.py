"""Backward passes that fail at different layers of the ranks, and are caught or left out."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_ext
from tests.common import engines
from tests.common.engines import rows
from tests.common.ranks import whole

LAYERS, WIDTH, STEPS, LR = 4, 6, 3, 0.1
WELL, NO_BATCH = LAYERS, LAYERS + 1  # instead of a number of layers


class Failure(Exception):
    """What a rank's backward pass raises."""


class Model(nn.Module):
    """A stack of layers, each of which needs a bucket: the next layer's gradient sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor, fails_after: int = WELL) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + fails_after == LAYERS - 1:
                x.register_hook(_fail)
            x = x.tanh()
        return x


def _fail(grad: Tensor) -> None:
    raise Failure


class Case(NamedTuple):
    """How the second of three steps goes wrong.

    A rank's backward pass fails after the gradients of so many layers, is ``WELL``, or does not
    run: the rank ends the step alone (``NO_BATCH``).
    """

    stage: int | None  # None: fuse_into_backward
    ends: tuple[int, ...]  # of each rank
    policy: str = "fused"
    clip: float = 0.0
    zero_grad: bool = True  # whether a rank that has caught an error calls it
    reads_norm: bool = False  # by torch's function, before each step
    ahead: bool = False  # as on a GPU, whose ranks read an answer when the next bucket is full


def make() -> tuple[Model, ds_ext.LOMO]:
    torch.manual_seed(3)
    model = Model()
    return model, ds_ext.LOMO(model.parameters(), lr=LR)


def loss_of(model: Any, number: int, rank: int, fails_after: int = WELL) -> Tensor:
    return model(rows(number, rank, 3, WIDTH), fails_after).square().sum()


def _is_well(engine: Any, *of: int) -> bool:
    """Runs a backward pass -> whether it ended without ``Failure``."""
    try:
        engine.backward(loss_of(engine, *of))
    except Failure:
        return False
    return True


def train(case: Case) -> tuple[list[tuple[int, str]], dict[str, Tensor]]:
    """The error of each step that had one, and the weights unless the last one had."""
    model, optimizer = make()
    rank, errors = dist.get_rank(), []
    if case.ahead:
        how = {"bucket_size": 40, "group": dist.new_group(), "gradient_policy": case.policy}
        engine: Any = engines.Fused(model, optimizer, 1, **how)
        engine.fused.layout.host_group = dist.new_group()  # where no sums of gradients wait
        engine.fused.buckets.asks_ahead = True
    else:
        zero = {"reduce_bucket_size": 40, "stage3_param_persistence_threshold": 10}
        how = {"gradient_clipping": case.clip, "zero": zero}
        engine = engines.start(model, optimizer, case.stage, case.policy, **how)
    for step in range(STEPS):
        fails_after = case.ends[rank] if step == 1 else WELL
        try:
            if fails_after != NO_BATCH and not _is_well(engine, step, rank, fails_after):
                errors.append((step, "Failure"))
                if case.zero_grad:
                    model.zero_grad()
                continue
            if case.reads_norm:
                nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            engine.step()
        except RuntimeError as error:
            errors.append((step, str(error)))
            return errors, {}
    return errors, whole(model)


def legal(how: str) -> list[str]:
    """What becomes of three steps under ``fuse_into_backward``, the second of which is unusual.

    Args:
        how: "empty batch": the last rank has none, and all drop the step; "before a gradient": all
            fail at one place, the last rank before its first gradient; "probe": the first rank
            catches an error of ``torch.autograd.grad``.
    """
    model, optimizer = make()
    ds_ext.fuse_into_backward(model, optimizer, bucket_size=10**6)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    seen = []
    for step in range(STEPS):
        loss = loss_of(model, step, dist.get_rank())
        if step == 1 and how == "before a gradient":
            loss = model(rows(step, 0, 3, WIDTH), 0 if is_last else 2).sum()
        try:
            if not (step == 1 and how == "empty batch" and is_last):
                loss.backward(retain_graph=True)
            if step == 1 and how == "probe" and not is_last:
                torch.autograd.grad(loss, torch.zeros(3, requires_grad=True))
        except (Failure, RuntimeError) as error:
            seen.append(type(error).__name__)
        if step == 1 and how != "probe":
            optimizer.zero_grad()
        else:
            optimizer.step()
    return seen
