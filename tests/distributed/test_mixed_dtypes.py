"""Engines over fp64 models, and over models of several dtypes, against one process."""

from typing import Any

import pytest

from tests import worlds
from tests.common.plain import mean_step
from tests.common.updates import check_each
from tests.distributed import mixed_dtypes_jobs
from tests.unit.test_dtypes_mixed import F32, F64, make, optimizer_of

IN_FP32: dict[str, Any] = {"communication_data_type": "fp32"}
CASES = [
    *(("came", stage, [F64, F64], "fused", 0.0, {}) for stage in range(4)),
    *(("adalomo", stage, [F32, F64, F32], "fused", 0.01, {}) for stage in range(4)),
    *(("galoreadamw", stage, [F64, F32], "sharded", 0.01, {}) for stage in (1, 3)),
    *(("came", 2, [F64, F64], policy, 0.0, IN_FP32) for policy in ("fused", "sharded")),
]


@pytest.mark.parametrize("name, stage, dtypes, policy, max_norm, more", CASES, ids=str)
def test_engines_train_fp64_and_mixed_models(name, stage, dtypes, policy, max_norm, more):
    plain = make(dtypes)
    optimizer = optimizer_of(name, plain.parameters())
    for step in range(mixed_dtypes_jobs.STEPS):
        losses = [plain(mixed_dtypes_jobs.data(step, rank)) for rank in range(2)]
        norm = mean_step(optimizer, losses, max_norm)
    bound = 1e-11 if set(dtypes) == {F64} and not more else 1e-5
    for got in worlds.run(2, mixed_dtypes_jobs.train, name, stage, dtypes, policy, max_norm, more):
        assert got["norm"] == pytest.approx(norm, rel=bound)
        expected = dict(plain.named_parameters())
        check_each(got["after"], expected, got["before"], close=bound)
        assert all(got["after"][n].dtype == p.dtype for n, p in expected.items())
