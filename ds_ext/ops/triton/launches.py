"""From ops to kernels: what each op asks for, one function for each.

An op asks here first. Where its tensors lie on a GPU and a kernel can read all of its runs, the
pass becomes a ``Request``; else the answer is NotImplemented, and the op does it itself. Without
Triton that is always so.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_ext.ops.shard import Shard
from ds_ext.ops.sources import Kept, Number, Source, kept_of, source_of
from ds_ext.ops.triton import folds, sizes, tiles
from ds_ext.ops.triton.batches import TOGETHER, ask, launch, together
from ds_ext.ops.triton.request import Request, over_groups, over_matrices, over_run, over_strips

__all__ = [
    "DEVICES",
    "MATRICES",
    "TOGETHER",
    "Kept",
    "Source",
    "apply_",
    "factors_",
    "kept_of",
    "launch",
    "lerp_",
    "mark_",
    "matrix_square_sums",
    "mend_",
    "normalize_whole_rows",
    "source_of",
    "square_lerp_",
    "square_sums",
    "squares_",
    "together",
    "tried",
    "weighed_square_sums",
]

DEVICES = {"cuda"}  # whose tensors kernels take
MATRICES = 128  # of a parameter, at most, whose rows and columns kernels add up


def tried(kernel: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an op ask ``kernel``, which takes the same and returns NotImplemented for "do it"."""

    def decorate(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def asked(*args: Any, **numbers: Number) -> Any:
            made = kernel(*args, **numbers)
            if made is NotImplemented:
                launch()  # what the op reads may wait
                return op(*args, **numbers)
            return made

        return asked

    return decorate


def square_sums(runs: Sequence[Any], shard: Shard, like: Any) -> Any:
    """Asks for the kernel of ``passes.square_sums``; NotImplemented where none can do it."""
    sources = [s for x in runs if (s := source_of(x)) is not None]
    if len(sources) < len(runs) or not all(_reads(s, like, shard) for s in sources):
        return NotImplemented
    totals = list(_new(len(runs), device=like.device).zero_().unbind())
    for source, total in zip(sources, totals, strict=True):
        made = over_run("squares", source, shard)
        part = _new(made.programs, device=like.device)
        ask(made.plus({"part": part}), [folds.fold(part, total)])
    return totals


def matrix_square_sums(x: Any, shard: Shard, like: Any) -> Any:
    """Asks for the kernel of ``passes.matrix_square_sums``; NotImplemented where none can do it."""
    source = source_of(x)
    if not _takes_matrices(like, shard) or source is None:
        return NotImplemented
    row, col = _zeros(shard, like.device, shard.rows, shard.cols)
    made = over_matrices("statistics", source, shard)
    if made.programs:
        own, rows, cols = tiles.alone(shard)
        mats, down = tiles.touched(own), made.geometry["down"]
        tall = _new(tiles.across(own), mats, down * sizes.TR, device=like.device)
        wide = _new(mats, down, own.cols, device=like.device)
        by_row = folds.over_columns(tall, row[:, rows], made.geometry)
        by_col = folds.over_rows(wide, col[:, cols], made.geometry)
        ask(made.plus({"part": tall, "part2": wide}), [*by_row, *by_col])
    return row, col


def weighed_square_sums(
    x: Any, before: Tensor, eps: float, beta: float, shard: Shard, like: Any
) -> Any:
    """Asks for the kernel of ``passes.weighed_square_sums``; NotImplemented if none can do it."""
    source = source_of(x)
    if not _takes_matrices(like, shard) or source is None or source.form != "IS_RUN":
        return NotImplemented
    if shard.cols > sizes.WIDEST:
        return NotImplemented
    before, share = before * beta + (1 - beta) * eps, (1 - beta) / shard.cols
    row, col, weighed = _zeros(shard, like.device, shard.rows, shard.cols, shard.cols)
    made = over_strips("weighed", source, shard)
    if made.programs:
        own, rows, _ = tiles.alone(shard)
        mats, down = tiles.touched(own), made.geometry["down"]
        plain, divided = _new(2, mats, down, shard.cols, device=like.device)
        tensors = {"out": row[:, rows], "before": before[:, rows], "part": plain, "part2": divided}
        by_col = folds.over_rows(plain, col, made.geometry)
        by_col_divided = folds.over_rows(divided, weighed, made.geometry)
        ask(made.plus(tensors, share=share), [*by_col, *by_col_divided])
    return row, col, weighed


def normalize_whole_rows(x: Any, least: Number, shard: Shard, like: Any) -> Any:
    """Asks for the kernel of ``ops.normalize_whole_rows``; NotImplemented if none can do it."""
    source = source_of(x.x)
    if not _takes_matrices(like, shard) or source is None or source.form != "IS_RUN":
        return NotImplemented
    if shard.cols > sizes.WIDEST:
        return NotImplemented
    row, sums = _zeros(shard, like.device, shard.rows, shard.cols)
    made = over_strips("normalize_whole_rows", source, shard)
    if made.programs:
        own, rows, _ = tiles.alone(shard)
        part = _new(tiles.touched(own), made.geometry["down"], shard.cols, device=like.device)
        tensors = {"before": x.row[:, rows], "col": x.col, "out": row[:, rows], "part": part}
        made = made.plus(tensors, a=shard.cols**0.5, b=least)
        ask(made, [*folds.over_rows(part, sums, made.geometry)])
    return replace(x, row=row.unsqueeze(-1)), sums


def factors_(
    row: Tensor,
    col: Tensor,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    shard: Shard,
) -> Any:
    """Asks for the kernel of ``passes.factors_``; NotImplemented where none can do it."""
    if not _takes_matrices(row, shard) or not shard.numel:
        return NotImplemented
    by_row, by_col = torch.empty_like(row), torch.empty_like(col)
    geometry = {"mats": shard.mats, "rows": shard.rows, "cols": shard.cols}
    tensors = {"row": row, "col": col, "out": by_row, "v": by_col}
    tensors |= {"part": sums[0].contiguous(), "part2": sums[1].contiguous()}
    made = Request("factors", (), 1, geometry, tensors, {"share": 1 - beta, "b": eps})
    if len(sums) > 2:
        made = replace(made, kernel="clipped_factors")
        made = made.plus({"x": sums[2].contiguous()}, bound=clip, a=1.0 / shard.numel)
    ask(made)
    return by_row.unsqueeze(-1), by_col.unsqueeze(-2)


def squares_(x: Any, shard: Shard, like: Any) -> Any:
    """Asks for the kernel of ``passes.squares``; NotImplemented where none can do it."""
    if not _reads(source_of(x), like, shard):
        return NotImplemented
    out = _new(shard.numel, device=like.device).zero_()
    square_lerp_(out[shard.start : shard.stop], x, 0.0, 1.0, shard)
    return out


def lerp_(m: Any, x: Any, weight: float, shard: Shard) -> Any:
    """Asks for the kernel of ``passes.lerp_``; NotImplemented where none can do it."""
    return _advance_("lerp", m, x, shard, share=weight)


def square_lerp_(v: Any, x: Any, eps: float, weight: float, shard: Shard) -> Any:
    """Asks for the kernel of ``passes.square_lerp_``; NotImplemented where none can do it."""
    return _advance_("square_lerp", v, x, shard, share=weight, b=eps)


def _advance_(kernel: str, m: Any, x: Any, shard: Shard, **numbers: float) -> Any:
    """Asks for a kernel that advances ``m`` by ``x``."""
    source = source_of(x)
    if not isinstance(m, Tensor) or source is None or not _reads(source, m, shard):
        return NotImplemented
    return ask(over_run(kernel, source, shard).plus({"out": m}, **numbers))


def apply_(p: Any, u: Any, shard: Shard, *, lr: Number, weight_decay: Number = 0.0) -> Any:
    """Asks for the kernel of ``passes.apply_``; NotImplemented where none can do it."""
    source, kept = source_of(u), kept_of(p)
    if source is None or kept is None or not _reads(source, kept.run, shard):
        return NotImplemented
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        if source.kept is not None:
            return NotImplemented
        source = source.plus(source.form, {}, decay=weight_decay)
    return ask(over_run("apply", replace(source, kept=kept), shard).plus({}, lr=lr))


def mark_(run: Tensor, out: Tensor) -> Any:
    """Asks for the kernel of ``edits._mark_``; NotImplemented where none can do it."""
    if not _takes_runs(run):
        return NotImplemented
    return ask(over_groups("mark", run, {"out": out}))


def mend_(run: Tensor, residual: Tensor, marked: Tensor | None) -> Any:
    """Asks for the kernel of ``edits.mend_``; NotImplemented where none can do it."""
    if not _takes_runs(run):
        return NotImplemented
    tensors = {"aux": residual}
    if marked is not None:
        return ask(over_groups("mend", run, {**tensors, "before": marked}, residual.dtype))
    if residual.dtype == torch.int8:
        return None  # stands for a number whatever it is
    return ask(over_groups("mend_unmarked", run, tensors))


def _takes_runs(like: Any) -> bool:
    """Whether kernels take tensors that lie where this does."""
    return like.device.type in DEVICES and _are_there()


def _takes(like: Any, shard: Shard) -> bool:
    """Whether kernels take a run of ``shard`` with the device and dtype of ``like``."""
    if like.device.type not in DEVICES or like.dtype == torch.float64:
        return False
    return (shard.split is None or len(list(shard.pieces())) < 2) and _are_there()


def _takes_matrices(like: Any, shard: Shard) -> bool:
    """The same of sums over rows and columns, and of quotients by them.

    Each matrix has tiles of its own and sums to be folded up: the ops are better at stacks of many.
    """
    return shard.mats <= MATRICES and _takes(like, shard)


def _reads(source: Source | None, like: Any, shard: Shard) -> bool:
    """Whether a kernel can read this."""
    if source is None:
        return False
    return (_takes_matrices if source.is_by_matrix else _takes)(like, shard)


@functools.cache
def _are_there() -> bool:
    """Whether Triton is installed; imports the kernels, which takes Triton with them."""
    try:
        from ds_ext.ops.triton import kernels  # noqa: F401
    except ImportError:  # a torch without Triton: the ops serve
        return False
    return True


def _new(*shape: int, device: torch.device) -> Tensor:
    """Memory for what kernels write, which is all fp32."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def _zeros(shard: Shard, device: torch.device, *widths: int) -> list[Tensor]:
    """Zeros [mats, n] for each of ``widths``, of one tensor: a launch for all."""
    zeros = _new(shard.mats * sum(widths), device=device).zero_()
    parts = zeros.split([shard.mats * n for n in widths])
    return [x.view(shard.mats, n) for x, n in zip(parts, widths, strict=True)]
