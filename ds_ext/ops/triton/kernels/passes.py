"""The passes over a run that need no rows or columns of it."""

import triton
import triton.language as tl

from ds_ext.ops.triton.kernels.moments import moved
from ds_ext.ops.triton.kernels.table import (
    COLS,
    LR,
    OUT,
    PART,
    PART2,
    SHARE,
    B,
    elements_of,
    number,
    parameter_of,
    pointer,
    rows_of,
    run_at,
)
from ds_ext.ops.triton.kernels.values import value_of
from ds_ext.ops.triton.kernels.weights import load_weight, store_weight


@triton.jit
def _read(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What this program reads -> its parameter, its tile, where its rows begin in the run, which
    elements that has, their values.
    """
    t, tile = parameter_of(table, count, COUNT)
    across = tl.cdiv(tl.load(t + COLS), TC)
    mat, r, has_row = rows_of(t, tile // across, TR)
    e, ok, j = elements_of(t, mat, r, has_row, (tile % across) * TC, TC, ALIGNED)
    u = value_of(t, e, ok, mat, r, has_row, j, TR, TC, ALIGNED, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
    return t, tile, e, ok, u


@triton.jit
def squares(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Leaves the sum of the squares of each tile in part, [tiles]."""
    t, tile, e, ok, u = _read(
        table, count, COUNT, TR, TC, ALIGNED, FORM, XD, BOUNDED, DECAYS, WD, KEPT
    )
    tl.store(pointer(t, PART, tl.float32) + tile, tl.sum(tl.sum(u * u, axis=1), axis=0))


@triton.jit
def _advance(t, e, ok, u, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """out ← out + share · (u − out)."""
    out = run_at(t, OUT, tl.float32, e, TC, ALIGNED)
    m = tl.load(out, mask=ok, other=0.0)
    tl.store(out, moved(m, u, number(t, SHARE)), mask=ok)


@triton.jit
def lerp(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """out ← out + share · (u − out)."""
    t, tile, e, ok, u = _read(
        table, count, COUNT, TR, TC, ALIGNED, FORM, XD, BOUNDED, DECAYS, WD, KEPT
    )
    _advance(t, e, ok, u, TC, ALIGNED)


@triton.jit
def square_lerp(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """out ← out + share · (u² + b − out)."""
    t, tile, e, ok, u = _read(
        table, count, COUNT, TR, TC, ALIGNED, FORM, XD, BOUNDED, DECAYS, WD, KEPT
    )
    _advance(t, e, ok, u * u + number(t, B), TC, ALIGNED)


@triton.jit
def apply(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """w ← w − lr · u."""
    t, tile, e, ok, u = _read(
        table, count, COUNT, TR, TC, ALIGNED, FORM, XD, BOUNDED, DECAYS, WD, KEPT
    )
    new = load_weight(t, e, ok, TC, ALIGNED, WD, KEPT) - number(t, LR) * u
    store_weight(t, e, ok, new, TC, ALIGNED, WD, KEPT)


@triton.jit
def measured_apply(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The same, and the sums of the squares of changes, in part, and of new weights as they are
    kept, in part2: both [tiles].
    """
    t, tile, e, ok, u = _read(
        table, count, COUNT, TR, TC, ALIGNED, FORM, XD, BOUNDED, DECAYS, WD, KEPT
    )
    old = load_weight(t, e, ok, TC, ALIGNED, WD, KEPT)
    store_weight(t, e, ok, old - number(t, LR) * u, TC, ALIGNED, WD, KEPT)
    tl.debug_barrier()  # what another thread has stored is read
    held = load_weight(t, e, ok, TC, ALIGNED, WD, KEPT)
    change, held = tl.where(ok, held - old, 0.0), tl.where(ok, held, 0.0)
    tl.store(pointer(t, PART, tl.float32) + tile, tl.sum(tl.sum(change * change, axis=1), axis=0))
    tl.store(pointer(t, PART2, tl.float32) + tile, tl.sum(tl.sum(held * held, axis=1), axis=0))
