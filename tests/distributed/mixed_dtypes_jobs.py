"""Jobs of test_mixed_dtypes.py: engines over fp64 models, and over models of several dtypes."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.distributed.exact_clipping_jobs import config
from tests.distributed.training_jobs import whole
from tests.unit.test_dtypes_mixed import Mixed, make, optimizer_of

STEPS = 3


def data(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, dtype=torch.float64, generator=generator)


def train(
    name: str,
    stage: int,
    dtypes: list[torch.dtype],
    policy: str,
    max_norm: float,
    more: dict[str, Any],
) -> dict[str, Any]:
    made = config(stage) | {"ds_ext": {"gradient_policy": policy}, "gradient_clipping": max_norm}
    made |= more
    model: Mixed = make(dtypes)
    before = whole(model)
    optimizer = optimizer_of(name, model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=made)[0]
    for step in range(STEPS):
        engine.backward(engine(data(step, dist.get_rank())))
        engine.step()
    return {"before": before, "after": whole(model), "norm": engine.get_global_grad_norm()}
