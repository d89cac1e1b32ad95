"""This rank's shard of each parameter under AutoTP, DeepSpeed's tensor parallelism.

AutoTP's layers describe their parameters for universal checkpoints. A description contains the
shape of the whole parameter, and the pieces that each rank stores consecutively.
"""

from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap, contiguous_split_map
from torch import Tensor

from ds_ext.distributed.placement import TensorParallelShard
from ds_ext.engine import parameters
from ds_ext.ops.shard import Box, TensorParallelSplit


def tensor_parallel_shards(
    names: Mapping[Tensor, str], rank: int, ranks: int, order: tuple[int, ...] | None
) -> dict[Tensor, TensorParallelShard]:
    """Returns the shards of the parameters that tensor parallelism has split.

    ``rank`` is the one in the tensor-parallel group. Data parallelism divides a shard into
    ``ranks`` parts. ``order`` see ``TensorParallelSplit``.

    Raises:
        ValueError: a layer's description of its split is missing or unsupported.
    """
    found = {}
    for param, name in names.items():
        described = parameters.description(param)
        if described is None or not parameters.is_divided(param):
            if described is None and getattr(param, "tensor_model_parallel", False):
                raise ValueError(_unknown(name, _UNDESCRIBED))
            continue
        made = _map(described, name)
        boxes = tuple(
            tuple(_box(piece, made, r, name) for piece in pieces if piece.numel)
            for r, pieces in sorted(made.pieces_by_rank.items())
        )
        found[param] = TensorParallelShard(
            made.logical_shape, TensorParallelSplit(boxes, ranks, order), rank
        )
    return found


def _map(described: dict[str, Any], name: str) -> ParamAffineMap:
    """The map from each rank's elements to the whole parameter."""
    conversion = described["conversion"]
    if "affine_map" in conversion:
        return ParamAffineMap.from_dict(conversion["affine_map"])
    shape, sizes, at = (
        described[key] for key in ("logical_shape", "partition_sizes", "partition_dim")
    )
    if not shape or not sizes or at is None:  # only DeepSpeed's sliced embeddings have them
        raise ValueError(_unknown(name, conversion["unsupported_reason"] or _UNDESCRIBED))
    return contiguous_split_map(shape, sizes, at)


def _box(piece: AffinePiece, made: ParamAffineMap, rank: int, name: str) -> Box:
    """A piece as a box of the whole matrix."""
    own, cols = made.shard_shapes[rank], made.logical_shape[-1]
    if len(own) > 2 or (len(own) == 2 and piece.shape[1] != own[1]):
        raise ValueError(_unknown(name, "columns of several parts, or three dimensions"))
    if len(piece.locations) > 1 or piece.scale != 1:
        raise ValueError(_unknown(name, "several ranks have the same part, or a part is scaled"))
    row, col = divmod(piece.source_offset, cols)  # a vector has one row
    rows, n = (1, *piece.shape)[-2:]
    return Box(row, rows, col, n)


_UNDESCRIBED = "its layer has no description of the split"


def _unknown(name: str, how: str) -> str:
    return (
        f"tensor_parallel.autotp_size: ds_ext does not support how AutoTP splits {name} ({how}). "
        "Leave its layer unsplit with tensor_parallel.partition_config, or remove tensor_parallel."
    )
