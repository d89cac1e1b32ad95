"""DTensors as runs of matrices: parameters that torch has sharded over a mesh.

With ``fully_shard`` (FSDP2), a rank holds some rows of each parameter. With torch's tensor
parallelism, it holds rows or columns. With both, it holds a block of rows and columns. Torch shards
their gradients in the same way, averaged over the ranks.

Importing torch.distributed.tensor takes seconds; a program with DTensors has imported it.
"""

import functools
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ext.distributed import groups
from ds_ext.distributed.groups import Group, communicates
from ds_ext.distributed.placement import Placement, flat
from ds_ext.ops.shard import Box, Shard, TensorParallelSplit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_MODULE = "torch.distributed.tensor"


def is_dtensor(x: Tensor) -> "TypeGuard[DTensor]":
    """Returns whether a tensor is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, which shares its memory; any other tensor itself."""
    if not is_dtensor(x):
        return x
    with torch.no_grad():
        return x.to_local().detach()


def lying_as(param: Tensor, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a DTensor of ``shape``, placed like ``param``, that shares memory with ``part``."""
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    size = torch.Size(shape)
    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)


def ranks_of(params: Iterable[Tensor]) -> tuple[int, ...]:
    """Returns the global ranks that hold DTensors among ``params``, in order."""
    meshes = {id(m): m for m in (p.device_mesh for p in params if is_dtensor(p))}
    return tuple(sorted({r for mesh in meshes.values() for r in mesh.mesh.flatten().tolist()}))


class DTensorLocation(NamedTuple):
    """The location of a DTensor, from this rank's view."""

    shard: Shard  # which elements of the whole parameter this rank holds
    ranks: tuple[int, ...]  # global ranks of one replica, including this one


def locate(param: "DTensor") -> DTensorLocation:
    """Returns the location of a parameter.

    Raises:
        ValueError: its placements are not supported.
    """
    return _locate(tuple(param.shape), param.device_mesh, tuple(param.placements), dist.get_rank())


@functools.lru_cache(4096)
def _locate(
    shape: tuple[int, ...], mesh: "DeviceMesh", placements: tuple[Any, ...], rank: int
) -> DTensorLocation:
    _check(shape, mesh, placements)
    at = tuple((mesh.mesh == rank).nonzero().flatten().tolist())
    assert at, "the parameter is on a mesh that this rank is not part of"
    cutting = [i for i, x in enumerate(placements) if _cut_dim(x) is not None and mesh.size(i) > 1]
    one_copy = mesh.mesh[tuple(slice(None) if i in cutting else at[i] for i in range(mesh.ndim))]
    ranks = tuple(one_copy.flatten().tolist())
    if not cutting:
        return DTensorLocation(Shard.whole(shape), ranks)
    order = tuple(map(sorted(ranks).index, ranks))  # their ranks in the group: ``groups.of_ranks``
    if len(cutting) == 1 and _cut_dim(placements[cutting[0]]) == 0 and order == (*sorted(order),):
        rank_of_rows, world = at[cutting[0]], mesh.size(cutting[0])
        return DTensorLocation(rows_of(shape, rank_of_rows, world), ranks)
    sizes = [mesh.size(i) for i in cutting]
    cuts = [placements[i] for i in cutting]
    parts = list(itertools.product(*map(range, sizes)))
    boxes = tuple(_boxes(shape, _held(shape, sizes, cuts, part)) for part in parts)
    own = parts.index(tuple(at[i] for i in cutting))
    return DTensorLocation(
        Shard.of_split(shape, TensorParallelSplit(boxes, 1, order), own, 0), ranks
    )


def _check(shape: tuple[int, ...], mesh: "DeviceMesh", placements: Sequence[Any]) -> None:
    """Raises ValueError for partial sums, and for sharding in an unknown order."""
    for placement in placements:
        factor = getattr(placement, "split_factor", 1)
        after = math.prod(
            mesh.size(i)
            for i, x in enumerate(placements)
            if _cut_dim(x) == _cut_dim(placement) and not hasattr(x, "split_factor")
        )
        if placement.is_partial() or factor not in (1, after):
            raise ValueError(
                f"a parameter of shape {list(shape)} is a DTensor laid out as {placements}. Rules "
                "need rows or columns: use Shard and Replicate placements, as fully_shard and "
                "parallelize_module do."
            )


def _cut_dim(placement: Any) -> int | None:
    """The dimension that a placement shards; None if it does not."""
    dim = getattr(placement, "dim", None)
    return None if dim is None else int(dim)


def rows_of(shape: tuple[int, ...], rank: int, world: int) -> Shard:
    """Returns the run of ``Shard(0)``: equally many whole rows, or fewer on the last ranks."""
    numel = math.prod(shape)
    size = -(-shape[0] // world) * math.prod(shape[1:])
    return Shard(shape, min(rank * size, numel), min((rank + 1) * size, numel), size)


def _held(
    shape: Sequence[int], sizes: Sequence[int], cuts: Sequence[Any], at: Sequence[int]
) -> list[range]:
    """The indices of each dimension that the rank at a coordinate holds.

    Mesh dimensions are applied in order, strided ones last, because ``fully_shard`` shards the
    parts of tensor parallelism.
    """
    held = [range(n) for n in shape]
    order = sorted(range(len(cuts)), key=lambda i: hasattr(cuts[i], "split_factor"))
    for i in order:
        dim = _cut_dim(cuts[i])
        assert dim is not None
        size = -(-len(held[dim]) // sizes[i])
        held[dim] = held[dim][at[i] * size : (at[i] + 1) * size]
    return held


def _boxes(shape: Sequence[int], held: Sequence[range]) -> tuple[Box, ...]:
    """The boxes of held indices, in memory order; the rows of all matrices are counted together."""
    if not all(held):
        return ()
    *above, rows, cols = (range(1), *held)[-max(2, len(held)) :]
    height = shape[-2] if len(shape) > 1 else 1
    boxes: list[Box] = []
    for index in itertools.product(*above):
        matrix = 0
        for i, n in zip(index, shape, strict=False):
            matrix = matrix * n + i
        box = Box(matrix * height + rows.start, len(rows), cols.start, len(cols))
        last = boxes[-1] if boxes else None
        if last is not None and last.row + last.rows == box.row:  # the matrix before, whole
            boxes[-1] = last._replace(rows=last.rows + box.rows)
        else:
            boxes.append(box)
    return tuple(boxes)


class DTensorPlacement(Placement):
    """DTensors: a rank holds only its part, and torch has already reduced the gradients.

    Args:
        statistics_group: the ranks of one replica.
        num_replicas: how many ranks hold the same part.
        is_divided: whether parts are boxes, not consecutive elements of the flattened parameter.
    """

    def __init__(self, statistics_group: Group, num_replicas: int, is_divided: bool) -> None:
        super().__init__(None, statistics_group=statistics_group, num_replicas=num_replicas)
        self.is_divided = is_divided

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """Returns the shape of this rank's part."""
        return tuple(local(param).shape)

    def shard(self, param: Tensor) -> Shard:
        """Returns which elements of the whole parameter this rank holds."""
        return locate(param).shard  # type: ignore[arg-type]

    def run(self, param: Tensor, shard: Shard) -> Tensor:
        """Returns this rank's part of the weight, [len(shard)], which is updated in place."""
        return flat(local(param))

    def padded_numel(self, param: Tensor) -> int:
        """Returns the elements of this rank's part, without padding."""
        return len(self.shard(param))

    def max_padded_numel(self, param: Tensor) -> int:
        """Returns the same for the rank that holds most."""
        shard = self.shard(param)
        if shard.split is None:
            return shard.size
        return max(map(shard.split.numel, range(len(shard.split.boxes))))

    def gradient(self, param: Tensor, grad: Tensor) -> Tensor:
        """Returns this rank's part of a gradient, redistributed like the parameter if needed."""
        if is_dtensor(grad) and is_dtensor(param) and grad.placements != param.placements:
            grad = grad.redistribute(param.device_mesh, param.placements)
        return local(grad)

    def publish(self, params: Iterable[Tensor]) -> None:
        """Increments the version counters of the parts; no other rank holds them."""
        params = list(params)
        super().publish(params)
        super().publish(map(local, params))


@dataclass
class DTensorPlacementCache:
    """The placements of DTensors, one for each layout. All ranks make them in the same order."""

    world: int | None = None  # the number of ranks of the model; None: of each parameter's mesh
    made: dict[tuple[object, ...], DTensorPlacement] = field(default_factory=dict)

    def of(self, param: "DTensor") -> DTensorPlacement:
        """Returns a parameter's placement."""
        lies = locate(param)
        world = self.world or param.device_mesh.size()
        is_divided = lies.shard.split is not None
        key = lies.ranks, world, is_divided, param.device.type
        if key not in self.made:
            # Not of the mesh: torch may return an older one, whose groups were destroyed.
            own = groups.of_ranks(lies.ranks) if len(lies.ranks) > 1 else groups.alone()
            group = groups.with_own_queue(own, param.device) if communicates(own) else None
            self.made[key] = DTensorPlacement(group, world // len(lies.ranks), is_divided)
        return self.made[key]
