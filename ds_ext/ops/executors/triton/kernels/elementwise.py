"""The passes whose outputs are per element or per tile, not per row or column."""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels import fields as F
from ds_ext.ops.executors.triton.kernels.table_access import (
    divided,
    elements_of,
    first_of,
    integer,
    number,
    pointer,
    rows_of,
    run_at,
    size,
)
from ds_ext.ops.executors.triton.kernels.values import moved, value_of
from ds_ext.ops.executors.triton.kernels.weights import load_weight, store_weight


@triton.jit
def _read(t, tile, P: tl.constexpr):
    """Reads a tile -> offsets of its rows in the run, mask of the run's elements, inputs."""
    down, over = divided(tile, tl.cdiv(size(t, F.COLS), P.TC))
    mat, top = rows_of(t, down, P.TR)
    c = over * P.TC
    e, ok = elements_of(t, mat, top, c, P)
    u = value_of(t, e, ok, mat, top, c, P)
    return e, ok, u


@triton.jit
def square_sums(t, tile, P: tl.constexpr):
    """part ← the sum of squares of each tile, [tiles]."""
    _, ok, u = _read(t, tile, P)
    tl.store(pointer(t, F.PART, tl.float32) + tile, _sum_of_squares(ok, u))


@triton.jit
def _sum_of_squares(ok, u):
    """The sum over the elements of a tile that are in the run."""
    u = tl.where(ok, u, 0.0)
    return tl.sum(u * u)


@triton.jit
def lerp(t, tile, P: tl.constexpr):
    """out ← out + lerp · (u − out); ``square_lerp`` has u² + eps for u."""
    e, ok, u = _read(t, tile, P)
    if P.name == "square_lerp":
        u = u * u + number(t, F.EPS)
    out = run_at(t, F.OUT, tl.float32, e, P)
    m = tl.load(out, mask=ok, other=0.0)
    tl.store(out, moved(m, u, number(t, F.LERP)), mask=ok)


@triton.jit
def apply(t, tile, P: tl.constexpr):
    """w ← w − lr · u.

    ``apply_and_cache_norm`` writes part2 too: the sum of squares of the stored weights of each
    tile, [tiles], which ``cached_norm`` reads in the next step.
    """
    e, ok, u = _read(t, tile, P)
    new = load_weight(t, e, ok, P) - number(t, F.LR) * u
    held = store_weight(t, e, ok, new, P)
    if P.name == "apply_and_cache_norm":
        # 0 outside the run, or NaN if elements of the run are NaN too
        tl.store(pointer(t, F.PART2, tl.float32) + tile, tl.sum(held * held))
        _store_probe(t, tile, P)


@triton.jit
def _first_of_tile(t, tile, P: tl.constexpr):
    """The index in the run of a tile's first element; outside [0, n) if the run lacks it."""
    down, over = divided(tile, tl.cdiv(size(t, F.COLS), P.TC))
    mat, top = rows_of(t, down, P.TR)
    return first_of(t, mat, top, over * P.TC)


@triton.jit
def _store_probe(t, tile, P: tl.constexpr):
    """probe ← the first weight of a tile."""
    tl.debug_barrier()  # another thread may have stored it
    at = _first_of_tile(t, tile, P)
    has = (at >= 0) & (at < integer(t, F.N))
    w = tl.load(pointer(t, F.W, P.WD) + at, mask=has, other=0.0)
    tl.store(pointer(t, F.PROBE, tl.float32) + tile, w.to(tl.float32))


@triton.jit
def cached_norm(t, tile, P: tl.constexpr):
    """out ← the sum of squares of the weights: the sum of part2 over ``total`` tiles.

    If a probed weight has changed since they were written, reads all weights instead.
    """
    LONG: tl.constexpr = P.LONG
    total, n = size(t, F.TOTAL), integer(t, F.N)
    sums = tl.zeros([LONG], dtype=tl.float32)
    changed = tl.zeros([LONG], dtype=tl.int32)
    for k in range(0, total, LONG):
        i = k + tl.arange(0, LONG)
        at = _first_of_tile(t, i, P)
        has = (i < total) & (at >= 0) & (at < n)
        w = tl.load(pointer(t, F.W, P.WD) + at, mask=has, other=0.0).to(tl.float32)
        probe = tl.load(pointer(t, F.PROBE, tl.float32) + i, mask=has, other=0.0)
        changed += (has & ((w == probe) == 0)).to(tl.int32)  # also for a NaN: no sum is cached yet
        sums += tl.load(pointer(t, F.PART2, tl.float32) + i, mask=i < total, other=0.0)
    has_changed = tl.sum(changed, axis=0) > 0
    again = tl.sum(tl.zeros([LONG], dtype=tl.float32), axis=0)
    for i in range(0, tl.where(has_changed, total, 0)):
        _, ok, u = _read(t, i, P)
        again += _sum_of_squares(ok, u)
    found = tl.where(has_changed, again, tl.sum(sums, axis=0))
    tl.store(pointer(t, F.OUT, tl.float32), found)
