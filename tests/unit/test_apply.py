"""Weight decay has one convention: p ← p (1 − lr · weight_decay) − lr · u, wherever it is used."""

import pytest
import torch

from ds_ext import ops
from ds_ext.ops.shard import Shard
from tests.common import needs, paths, table


@pytest.mark.parametrize("path", ["ops", pytest.param("kernels", marks=needs.triton)])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_decay_is_a_share_of_the_weight_times_lr(path, as_tensor, weight_decay, monkeypatch):
    paths.use(monkeypatch, path)
    p, u = table.weights([(300,)] * 2, torch.float32)
    lr = torch.tensor(0.125) if as_tensor else 0.125
    new, shard = p.clone(), Shard.whole((300,))
    ops.apply_(new, u, shard, lr=lr, weight_decay=weight_decay)
    expected = p.double() * (1 - 0.125 * weight_decay) - 0.125 * u.double()
    assert (new - expected).norm() <= 1e-6 * (expected - p).norm()
