"""What every registered rule has to hold on simulated ranks, whichever its formula.

The rules are those of the registry: one that is new is among them without a line here. What is
sharded is held against the same rule on whole parameters; what a rule computes is held against its
authors' code or its paper in a file of its own.
"""

import itertools
import math

import pytest
import torch

from ds_ext.ops.shard import Shard
from ds_ext.ops.state import leaves, saved
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.testing import check_rule
from ds_ext.testing.properties import endures_zeros
from tests.common import hypers, needs, paths
from tests.common.choose import params
from tests.common.simulated import BROKEN, EXACT, Ranks, dropping, shapes_of, sharded_error
from tests.common.table import gradients, weights
from tests.distributed import resume_jobs


def simulated_rule(name):
    return OPTIMIZERS[name].hypers(**hypers.SIMULATED[name])


# Rules that keep what others keep, or whose steps take longest.
LONG = ("sinkgd", "muon", "apollo", "apollomini", "came", "flashadamw")


@pytest.mark.parametrize("name", params(OPTIMIZERS, lambda name: name not in LONG))
def test_it_has_the_properties_of_every_rule(name):
    """The bases of GaLore, rank 3 here, follow the last bits of 16-bit gradients."""
    check_rule(simulated_rule(name), half_error=0.1 if name == "galoreadamw" else 2e-2)


MANY = [(name, 23) for name in OPTIMIZERS] + [("adalomo", 1024)]


@pytest.mark.parametrize("name, ranks", params(MANY, MANY[:-1]))
def test_more_ranks_than_elements(name, ranks):
    shapes = ((5,), (1, 7), (4, 5), (5, 4))
    assert sharded_error(name, ranks, 2, shapes=shapes)[0] <= EXACT


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_missing_reduction_is_seen(name):
    rule, shapes = simulated_rule(name), shapes_of(name, ((5,), (13, 29), (29, 13), (4, 3, 5)))
    before, (grads,) = weights(shapes), gradients(1, shapes)
    taken = Ranks(rule, before, 2).step(grads)
    assert taken == Ranks(rule, before, 2).step(grads, dropping(None))
    for number in range(taken):
        assert sharded_error(name, 2, 3, dropping(number), shapes)[0] > BROKEN


ZERO_GRADIENTS = [*((name, {}) for name in OPTIMIZERS)]
ZERO_GRADIENTS += [("galoreadamw", {"proj_type": "reverse_std"})]  # divides by singular values


@pytest.mark.parametrize("name, more", ZERO_GRADIENTS)
def test_nothing_becomes_nan_where_gradients_are_zero_or_of_low_rank(name, more):
    rule = OPTIMIZERS[name].hypers(**hypers.SIMULATED[name] | {"weight_decay": 0.0} | more)
    before = weights(shapes_of(name))
    ranks = Ranks(rule, before, 3)
    nothing = [torch.zeros_like(p) for p in before]
    for _ in range(2):
        ranks.step(nothing)
    assert all(map(torch.equal, ranks.params, before))
    for grads in gradients(2, shapes_of(name)):
        ranks.step(grads)
        ranks.step(nothing)
        ranks.step([g[..., :1] @ g[..., :1, :] if g.dim() > 1 else g for g in grads])  # of rank 1
    assert all(p.isfinite().all() for p in ranks.params)


ZEROS = ((6, 10), (10, 6), (12,), (5, 5), (4, 3, 5), (3, 2, 1, 1), (9,), (70, 70), (1, 40), (40, 1))
KERNEL_ZEROS = ((6, 10), (12,), (4, 3, 5), (5, 5))  # Triton's interpreter is slow
BY_PATH = itertools.product(OPTIMIZERS, ["ops", "native", *["kernels"][: needs.TRITON]])


# Of the kernels that divide, those of factors and of moments.
QUICK = ("adalomo", "flashadamw")


@pytest.mark.parametrize(
    "name, path", params(BY_PATH, lambda case: case[1] != "kernels" or case[0] in QUICK)
)
def test_zero_rows_and_columns_with_the_smallest_eps(name, path, monkeypatch):
    """In fp32, where statistics of zeros are zeros; later also where they have shrunk to that."""
    paths.use(monkeypatch, path)
    shapes = shapes_of(name, KERNEL_ZEROS if path == "kernels" else ZEROS)
    endures_zeros(simulated_rule(name), shapes)


N = 64 * 96
STATISTICS = 4 * (64 + 96)  # of rows and columns
LOW_RANK = 8 * 3 * 96  # two moments of a projected gradient
BYTES = {  # of the state of a matrix, on all ranks, with SIMULATED's hyper-parameters
    **{"lomo": 0, "sinkgd": 0, "scale": 4 * N, "lion": 4 * N, "muon": 4 * N},
    **{"lamb": 8 * N, "adamw": 8 * N, "flashadamw": 2 * N + N // 8},
    **{"adalomo": STATISTICS, "adafactor": STATISTICS + 4 * N, "came": 2 * STATISTICS + 4 * N},
    "galoreadamw": LOW_RANK + 4 * 3 * 64,  # and the basis
    **{name: LOW_RANK + 4 + 8 for name in ("apollo", "apollomini")},  # a norm and a stream
}


@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
@pytest.mark.parametrize("name", BYTES)
def test_ranks_share_a_state_of_known_size(name, shape):
    found = 0
    for rank in (0, 1):
        shard = Shard.of_rank(shape, rank, 2)
        for _, part in leaves(saved(simulated_rule(name).state_spec(shard))):
            if rank == 0 or not part.is_shared:
                found += math.prod(part.shape) * part.dtype_for(torch.float32).itemsize
    assert found == BYTES[name]


def test_the_kinds_of_runs_that_are_resumed_are_of_every_rule():
    assert {name for name, _ in resume_jobs.KINDS.values()} == set(OPTIMIZERS)
