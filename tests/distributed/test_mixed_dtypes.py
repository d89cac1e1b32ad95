"""Engines over fp64 models, and over models of several dtypes, against one process."""

from typing import Any

import pytest
import torch

from tests import worlds
from tests.common import engines
from tests.common.updates import check_each
from tests.unit.test_dtypes_mixed import F32, F64, make, optimizer_of

STEPS = 3


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(engines.rows(number, rank, 5, 6).double())


def train(
    name: str, stage: int, dtypes: list[torch.dtype], policy: str, more: dict[str, Any]
) -> dict[str, Any]:
    model = make(dtypes)
    optimizer = optimizer_of(name, model.parameters())
    return engines.trained(engines.start(model, optimizer, stage, policy, **more), loss_of, STEPS)


IN_FP32 = {"communication_data_type": "fp32"}
CLIP = {"gradient_clipping": 0.01}
CASES = [
    *(("came", stage, [F64, F64], "fused", {}) for stage in range(4)),
    *(("adalomo", stage, [F32, F64, F32], "fused", CLIP) for stage in range(4)),
    *(("galoreadamw", stage, [F64, F32], "sharded", CLIP) for stage in (1, 3)),
    *(("came", 2, [F64, F64], policy, IN_FP32) for policy in ("fused", "sharded")),
]


@pytest.mark.parametrize("name, stage, dtypes, policy, more", CASES, ids=str)
def test_engines_train_fp64_and_mixed_models(name, stage, dtypes, policy, more):
    model, norm = make(dtypes), more.get("gradient_clipping", 0.0)
    optimizer = optimizer_of(name, model.parameters())
    alone = engines.alone(model, optimizer, loss_of, STEPS, max_norm=norm)
    bound = 1e-11 if set(dtypes) == {F64} and more != IN_FP32 else 1e-5
    for got in worlds.run(2, train, name, stage, dtypes, policy, more):
        assert got["norms"] == pytest.approx(alone.norms, rel=bound)
        check_each(got["after"], alone.after, got["before"], close=bound)
        assert all(got["after"][n].dtype == p.dtype for n, p in alone.after.items())
