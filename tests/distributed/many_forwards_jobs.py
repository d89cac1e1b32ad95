"""Jobs whose losses use several forward passes of the engine: siamese, R-Drop, DPO."""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, logsigmoid

import ds_ext
from tests.distributed.skipped_batches_jobs import whole

LR = 0.5
STEPS = 3
Loss = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """Scores of rows; some of its features are dropped as ``keep`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h if keep is None else h * keep)


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, part: int, rank: int) -> Tensor:
    seed = 100 * step + 10 * part + rank
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def siamese(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x[:2]) - model(x[2:])).square().sum() + model(x[1:3]).sum()


def r_drop(model: nn.Module, x: Tensor) -> Tensor:
    odd = torch.arange(8) % 2
    a, b = (log_softmax(model(x, keep), dim=-1) for keep in (2 * odd, 2 * (1 - odd)))
    return kl_div(a, b, reduction="batchmean", log_target=True) - a[:, 0].mean() - b[:, 0].mean()


def dpo(model: nn.Module, x: Tensor) -> Tensor:
    chosen = model(x)
    with torch.no_grad():
        reference = model(x.flip(0))  # as of the same model without its adapters
    rejected = model(-x)
    return -logsigmoid(2 * (chosen - rejected - reference)).sum() - chosen[:, 0].mean()


def one(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


LOSSES: dict[str, Loss] = {"siamese": siamese, "r_drop": r_drop, "dpo": dpo, "one": one}


def engines(
    stage: int, policy: str, accumulation: int, max_norm: float, name: str, how: str
) -> dict[str, Any]:
    """Trains by our LOMO; or by SGD of torch in DeepSpeed's own optimizer if ``policy`` is ""."""
    model = make()
    kind = ds_ext.LOMO if policy else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=LR)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": LR / 4,
                "warmup_max_lr": LR,
                "warmup_num_steps": 4,
                "warmup_type": "linear",
            },
        },
    }
    if policy:
        config["ds_ext"] = {"gradient_policy": policy}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    before, told = whole(model), []
    for step in range(STEPS):
        losses = (
            LOSSES[name](engine, batch(step, part, dist.get_rank())) for part in range(accumulation)
        )
        for loss in [*losses] if how.endswith("ahead") else losses:
            engine.backward(loss) if how.startswith("engine") else loss.backward()
            is_boundary, lr = engine.is_gradient_accumulation_boundary(), engine.get_lr()[0]
            engine.step()
            told.append((is_boundary, lr, engine.micro_steps, engine.global_steps))
    return {
        "before": before,
        "after": whole(model),
        "told": told,
        "norm": float(engine.get_global_grad_norm() or 0),
    }


def reference(world: int, accumulation: int, max_norm: float, name: str, lrs: list[float]) -> Any:
    """SGD on the mean over ranks and micro-batches -> weights, the last norm."""
    model = make()
    for step in range(STEPS):
        model.zero_grad()
        for part in range(accumulation):
            for rank in range(world):
                (LOSSES[name](model, batch(step, part, rank)) / world / accumulation).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
        torch.optim.SGD(model.parameters(), lr=lrs[step]).step()
    return [p.detach() for p in model.parameters()], float(norm)
