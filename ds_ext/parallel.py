"""What DeepSpeed's tensor parallelism (AutoTP) has left of each parameter on this rank.

Its layers describe themselves for universal checkpoints: the shape of the whole parameter, and by
rank the pieces of it that lie one after another in that rank's memory. That is read here.
"""

from collections.abc import Mapping
from typing import Any

from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch import Tensor

from ds_ext.layout import Held
from ds_ext.shard import Box, Split


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """The shape that a parameter has without ZeRO-3 and tensor parallelism."""
    described = _described(param)
    own = tuple(getattr(param, "ds_shape", param.shape))
    return tuple(described["original_shape"] or own) if described else own


def held(names: Mapping[Tensor, str], rank: int, ranks: int) -> dict[Tensor, Held]:
    """What ``rank`` of tensor parallelism holds of the parameters that it has split.

    Each part is cut again for ``ranks`` of data parallelism. Raises ValueError for a layer whose
    division is not known.
    """
    found = {}
    for param, name in names.items():
        described = _described(param)
        if described is None:
            if getattr(param, "tensor_model_parallel", False):
                raise ValueError(_unknown(name, "its layer does not say how"))
            continue
        if described["replicated"]:
            continue
        if "affine_map" not in described:
            raise ValueError(_unknown(name, described["unsupported_reason"] or "it says nothing"))
        made = ParamAffineMap.from_dict(described["affine_map"])
        boxes = tuple(
            tuple(_box(piece, made, r, name) for piece in pieces if piece.numel)
            for r, pieces in sorted(made.pieces_by_rank.items())
        )
        found[param] = Held(made.logical_shape, Split(boxes, ranks), rank)
    return found


def _described(param: Tensor) -> dict[str, Any] | None:
    """What the layer of a parameter says of its division."""
    meta = getattr(param, DS_AUTOTP_UC_META, None)
    return meta["conversion"] if meta else None


def _box(piece: AffinePiece, made: ParamAffineMap, rank: int, name: str) -> Box:
    """A piece as a box of the whole matrix."""
    cols = made.logical_shape[-1]
    own = made.shard_shapes[rank]
    if len(own) > 2 or piece.shape[-1] != own[-1]:
        raise ValueError(_unknown(name, "by columns of several parts, or in three dimensions"))
    if len(piece.locations) > 1 or piece.scale != 1:
        raise ValueError(_unknown(name, "a part of it is on several ranks, or scaled"))
    row, col = divmod(piece.source_offset, cols) if len(own) > 1 else (0, piece.source_offset)
    return Box(row, piece.shape[0] if len(own) > 1 else 1, col, piece.shape[-1])


def _unknown(name: str, how: str) -> str:
    return (
        f"tensor_parallel.autotp_size: {name} is divided in a way that ds_ext cannot add up "
        f"statistics over ({how}). Keep its layer whole by tensor_parallel.partition_config, or "
        "remove tensor_parallel."
    )
