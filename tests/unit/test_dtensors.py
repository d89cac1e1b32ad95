"""Where DTensors lie, against what torch itself puts on each rank of a mesh."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from ds_ext.distributed import dtensors
from tests.common.simulated import fake_rank

SHAPES = ((1,), (7,), (16,), (1, 5), (5, 1), (7, 3), (8, 6), (2, 3, 4), (5, 2, 3), (4, 6, 2, 3))


def numbered(shape):
    """A parameter whose elements are their numbers."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def spread(shape, mesh, placements):
    """The same as a DTensor, each rank's part taken from its own whole one."""
    return distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None)


def elements(shard):
    """The numbers of the elements of a run in the flattened parameter, in the run's order."""
    whole = numbered(shard.shape).view(shard.mats, shard.rows, shard.cols)
    found = [whole[b.mats, b.rows, b.cols].flatten() for b in shard.blocks(limit=5)]
    return torch.cat(found) if found else torch.empty(0)


def check(param):
    """Compares where a parameter lies with the numbers that it has on this rank -> its shard."""
    lies = dtensors.locate(param)
    assert torch.equal(elements(lies.shard), dtensors.local(param).flatten())
    assert dist.get_rank() in lies.ranks
    return lies


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_rows_of_fully_shard_are_runs(size):
    seen = {shape: [] for shape in SHAPES}
    for rank in range(size):
        with fake_rank(rank, size):
            model = nn.ParameterList(nn.Parameter(numbered(shape)) for shape in SHAPES)
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
            for shape, param in zip(SHAPES, model, strict=True):
                lies = check(param)
                assert lies.ranks == (tuple(range(size)) if size > 1 else (0,))
                assert lies.shard.split is None and lies.shard.shape == shape
                assert lies.shard.holds_rows or len(shape) < 2
                seen[shape] += range(lies.shard.start, lies.shard.stop)
                assert len(lies.shard) == 0 or lies.shard.start in lies.shard.starts
    for shape, numbers in seen.items():
        assert numbers == [*range(math.prod(shape))]


MESHES = {"tensor": ((3,), ("t",)), "hybrid": ((2, 3), ("r", "s")), "both": ((2, 2), ("s", "t"))}
MESHES |= {"deep": ((2, 2, 2), ("r", "s", "t"))}
WAYS = {
    "tensor": [(Shard(0),), (Shard(1),), (Replicate(),)],
    "hybrid": [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Replicate())],
    "both": [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Shard(2), Shard(1))],
    "deep": [(Replicate(), Shard(0), Shard(1)), (Shard(0), Shard(1), Shard(0))],
}


@pytest.mark.parametrize("mesh, way", [(m, i) for m in WAYS for i in range(len(WAYS[m]))])
def test_cuts_of_any_dimensions_are_boxes(mesh, way):
    (sizes, names), placements = MESHES[mesh], WAYS[mesh][way]
    size, copies = math.prod(sizes), 1
    cut = {i for i, x in enumerate(placements) if isinstance(x, Shard)}
    copies = math.prod(n for i, n in enumerate(sizes) if i not in cut)
    deepest = max((x.dim for x in placements if isinstance(x, Shard)), default=0)
    for shape in (s for s in SHAPES if len(s) > deepest):
        seen, groups = [], set()
        for rank in range(size):
            with fake_rank(rank, size):
                at = init_device_mesh("cpu", sizes, mesh_dim_names=names)
                lies = check(spread(shape, at, placements))
                seen += elements(lies.shard).int().tolist()
                groups.add(lies.ranks)
                assert len(lies.ranks) == size // copies
        assert sorted(seen) == sorted([*range(math.prod(shape))] * copies)
        assert sorted(itertools.chain(*groups)) == [*range(size)]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (6, 4, 3)])
def test_fully_shard_cuts_what_tensor_parallelism_has_left(shape, placement):
    parts = []
    for rank in range(4):
        with fake_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = nn.ParameterList([nn.Parameter(spread(shape, mesh["tp"], [placement]))])
            fully_shard(model, mesh=mesh["dp"])
            parts.append(check(model[0]))
    seen = torch.cat([elements(lies.shard) for lies in parts])
    assert sorted(seen.tolist()) == [*range(math.prod(shape))]
    assert {lies.ranks for lies in parts} == {(0, 1, 2, 3)}
    firsts = [lies.shard.start for lies in parts if len(lies.shard)]
    assert len(set(firsts)) == len(firsts)


def test_sums_that_are_not_added_up_are_refused():
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        from torch.distributed.tensor import DTensor

        partial = DTensor.from_local(torch.ones(3, 4), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match="Shard and Replicate"):
            dtensors.locate(partial)
