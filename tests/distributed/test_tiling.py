"""DeepSpeed's tiled MLP and loss train as those that are not tiled do."""

import pytest
import torch

import ds_ext
from tests import worlds
from tests.common.choose import params
from tests.common.plain import mean_step
from tests.common.updates import check_each
from tests.distributed import tiling_jobs
from tests.distributed.tiling_jobs import Case

CLIP = 0.3
CASES = [
    *(Case(stage, max_norm) for stage in (None, 0, 2, 3) for max_norm in (0.0, CLIP)),
    *(Case(stage, max_norm, factor=3.0) for stage in (None, 2, 3) for max_norm in (0.0, CLIP)),
    Case(None, CLIP, tied=True, factor=3.0),
    Case(2, tied=True),
    Case(3, CLIP, tied=True),
    Case(2, CLIP, outside=True, factor=3.0),
    Case(3, outside=True),
    Case(2, CLIP, "sharded", factor=3.0, accumulation=2),
    Case(3, 0.0, "sharded", tied=True, accumulation=2),
    *(Case(stage, CLIP, reentrant=reentrant) for stage in (2, 3) for reentrant in (True, False)),
]
# What `make test` runs: some of each kind, at each stage.
QUICK = [(case,) for case in (*CASES[::3], CASES[20])]


@pytest.mark.parametrize("case", params([(case,) for case in CASES], QUICK), ids=str)
def test_tiled_functions_train_exactly(case):
    world = 2
    plain = tiling_jobs.make(case, tiled=False)
    for step in range(tiling_jobs.STEPS):
        parts = range(step * case.accumulation, (step + 1) * case.accumulation)
        losses = [tiling_jobs.loss_of(plain, part, rank) for part in parts for rank in range(world)]
        norm = mean_step(torch.optim.SGD(plain.parameters(), lr=0.5), losses, case.max_norm)
        assert norm > 1.1 * case.max_norm  # or it would show nothing
    for got in worlds.run(world, tiling_jobs.train, case):
        check_each(got["after"], dict(plain.named_parameters()), got["before"])
        assert not got["held"]  # none waits for the end of backward because of its tiles


@pytest.mark.parametrize("outside, name", [(True, "TiledMLP"), (False, "TiledFusedLogitsLoss")])
def test_a_gradient_penalty_is_refused(outside, name):
    model = tiling_jobs.make(Case(None, outside=outside), tiled=True)
    ds_ext.fuse_into_backward(model, ds_ext.LOMO(model.parameters(), lr=0.5))
    found = model(*tiling_jobs.batch(0, 0)).sum()
    with pytest.raises(RuntimeError, match=f"{name}: its gradients cannot be differentiated"):
        torch.autograd.grad(found, model.embed.weight, create_graph=True)
