"""fp64 models, and fp32, fp64 and 16-bit parameters in one bucket."""

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from tests.common import updates
from tests.common.choose import crossed
from tests.common.hypers import FOR_ALL, NEEDED


class Mixed(nn.Module):
    """Layers of the given dtypes, one after the other."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double().square().sum()


def optimizer_of(name, params):
    hypers = NEEDED[name] | {"weight_update": "nearest"}
    return OPTIMIZERS[name](params, **hypers)


def make(dtypes):
    torch.manual_seed(9)
    return Mixed(dtypes)


F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
CLIPPED, KEPT = {"max_grad_norm": 0.01}, {"gradient_policy": "sharded"}
CASES = [*(([F64, F64], how) for how in ({}, CLIPPED, KEPT))]
CASES += [*(([F32, F64, F32], how) for how in ({}, CLIPPED, KEPT))]
CASES += [*(([BF16, F64, F32], how) for how in ({}, KEPT))]


@pytest.mark.parametrize("name, dtypes, how", crossed(FOR_ALL, CASES), ids=str)
def test_parameters_of_all_dtypes_step_as_those_of_one_do(name, dtypes, how):
    model, plain = make(dtypes), make(dtypes)
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    optimizer = optimizer_of(name, model.parameters())
    fused = ds_ext.fuse_into_backward(model, optimizer, bucket_size=10**6, **how)
    alone = [
        optimizer_of(name, [p for p in plain.parameters() if p.dtype == dtype])
        for dtype in set(dtypes)
    ]
    for step in range(3):
        x = torch.randn(5, 6, dtype=F64, generator=torch.Generator().manual_seed(step))
        fused.backward(model(x))
        optimizer.step()
        plain.zero_grad()
        plain(x).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), how.get("max_grad_norm", torch.inf))
        for each in alone:
            each.step()
    bound = 1e-11 if set(dtypes) == {F64} else 1e-5
    expected, found = dict(plain.named_parameters()), dict(model.named_parameters())
    updates.check_each(found, expected, before, close=bound)
    assert all(found[n].dtype == p.dtype and not p.equal(before[n]) for n, p in expected.items())
