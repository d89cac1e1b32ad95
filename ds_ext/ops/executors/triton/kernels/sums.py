"""Sums of squares over rows and columns, and the reduction of the tiles' partial sums.

There are no atomics: each tile stores its partial sums, and ``fold`` reduces them. The order of a
sum depends on the geometry alone.
"""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels.table_access import (
    BEFORE,
    COL,
    COLS,
    EPS,
    FOUND,
    HEIGHT,
    IN,
    IN2,
    LERP,
    OUT,
    PART,
    PART2,
    ROW,
    ROWS,
    SCALE,
    START,
    TOTAL,
    A,
    N,
    X,
    divided,
    elements_of,
    hinted,
    integer,
    number,
    pointer,
    rows_of,
    size,
    vectors,
)
from ds_ext.ops.executors.triton.kernels.values import factor_and_bound, scaled, value_of

LARGEST_FACTOR = tl.constexpr(1e18)  # reference.LARGEST
LARGEST_WEIGHT = tl.constexpr(1e36)  # its square


@triton.jit
def row_weights(statistic):
    """1 / a row's statistic, at most LARGEST_WEIGHT: 0 / 0 is 0."""
    found = 1.0 / statistic
    return tl.where(found > LARGEST_WEIGHT, LARGEST_WEIGHT, found)


@triton.jit
def row_col_sums(t, tile, P: tl.constexpr):
    """Partial sums of squares of a tile: row sums in part, column sums in part2.

    part is [across, row tiles · TR], and part2 [row tiles, cols].
    """
    TR: tl.constexpr = P.TR
    TC: tl.constexpr = P.TC
    ALIGNED: tl.constexpr = P.ALIGNED
    cols = hinted(integer(t, COLS), ALIGNED)
    down, over = divided(tile, tl.cdiv(size(t, COLS), TC))
    mat, top = rows_of(t, down, TR)
    e, ok = elements_of(t, mat, top, over * TC, TR, TC, ALIGNED)
    u = value_of(t, e, ok, mat, top, over * TC, P)
    j = over * TC + tl.arange(0, TC)
    u = tl.where(ok, u, 0.0)
    square = u * u
    row = pointer(t, PART, tl.float32) + over * integer(t, HEIGHT) + down * TR + tl.arange(0, TR)
    tl.store(row, tl.sum(square, axis=1))
    col = vectors(t, PART2, tl.float32, ALIGNED) + down * cols + j
    tl.store(col, tl.sum(square, axis=0), mask=j < cols)


@triton.jit
def weighted_sums(t, tile, P: tl.constexpr):
    """out ← sums of squares over whole rows of a run (IS_RUN); part, part2 ← column sums of strips.

    part has the column sums of squares, part2 of squares divided by their row's new statistic,
    before + lerp · (sum / cols + eps − before). Both are [strips, cols].

    A row is no wider than a tile, so it is read once. The loop does not read the table, because
    these loads would use up the pipeline stages.
    """
    TR: tl.constexpr = P.TR
    TC: tl.constexpr = P.TC
    ALIGNED: tl.constexpr = P.ALIGNED
    XD: tl.constexpr = P.XD
    BOUNDED: tl.constexpr = P.BOUNDED
    STAGES: tl.constexpr = P.STAGES
    rows, cols = integer(t, ROWS), hinted(integer(t, COLS), ALIGNED)
    strip, start, n = size(t, HEIGHT), integer(t, START), integer(t, N)
    x, out = vectors(t, X, XD, ALIGNED), pointer(t, OUT, tl.float32)
    before, lerp, eps = pointer(t, BEFORE, tl.float32), number(t, LERP), number(t, EPS)
    factor, most = factor_and_bound(t, BOUNDED)
    mat, top = rows_of(t, tile, strip)
    j = tl.arange(0, TC)
    plain, divided = tl.zeros([TC], dtype=tl.float32), tl.zeros([TC], dtype=tl.float32)
    for i in tl.range(0, strip, TR, num_stages=STAGES):
        r = top + i + tl.arange(0, TR)
        row = mat * rows + r
        begin = row * cols - start
        own = (r < rows) & (begin >= 0) & (begin < n)  # rows of the run
        ok = own[:, None] & (j < cols)[None, :]
        values = tl.load(x + hinted(begin, ALIGNED)[:, None] + j[None, :], mask=ok, other=0.0)
        u = scaled(values, factor, most, BOUNDED)
        square = u * u
        sums = tl.sum(square, axis=1)
        old = (1.0 - lerp) * tl.load(before + row, mask=own, other=1.0) + lerp * eps
        weights = row_weights(old + lerp / cols.to(tl.float32) * sums)
        tl.store(out + row, sums, mask=own)
        plain += tl.sum(square, axis=0)
        divided += tl.sum(square * weights[:, None], axis=0)
    at = tile * cols + j
    tl.store(vectors(t, PART, tl.float32, ALIGNED) + at, plain, mask=j < cols)
    tl.store(vectors(t, PART2, tl.float32, ALIGNED) + at, divided, mask=j < cols)


@triton.jit
def normalize_whole_rows(t, tile, P: tl.constexpr):
    """out ← row · scale · a / max(norm, eps), norm that of a whole row of row · scale · x · col.

    part ← column sums of the squares of out · x · col over the rows of a strip, [strips, cols].
    Like ``weighted_sums``, it reads a row once.
    """
    TR: tl.constexpr = P.TR
    TC: tl.constexpr = P.TC
    ALIGNED: tl.constexpr = P.ALIGNED
    XD: tl.constexpr = P.XD
    BOUNDED: tl.constexpr = P.BOUNDED
    STAGES: tl.constexpr = P.STAGES
    rows, cols = integer(t, ROWS), hinted(integer(t, COLS), ALIGNED)
    strip, start, n = size(t, HEIGHT), integer(t, START), integer(t, N)
    x, out = vectors(t, X, XD, ALIGNED), pointer(t, OUT, tl.float32)
    by_row, root, least = pointer(t, ROW, tl.float32), number(t, A), number(t, EPS)
    factor, most = factor_and_bound(t, BOUNDED)
    scale = number(t, SCALE)
    mat, top = rows_of(t, tile, strip)
    j = tl.arange(0, TC)
    by_col = tl.load(pointer(t, COL, tl.float32) + mat * cols + j, mask=j < cols, other=0.0)
    sums = tl.zeros([TC], dtype=tl.float32)
    for i in tl.range(0, strip, TR, num_stages=STAGES):
        r = top + i + tl.arange(0, TR)
        row = mat * rows + r
        begin = row * cols - start
        own = (r < rows) & (begin >= 0) & (begin < n)  # rows of the run
        ok = own[:, None] & (j < cols)[None, :]
        values = tl.load(x + hinted(begin, ALIGNED)[:, None] + j[None, :], mask=ok, other=0.0)
        u = scaled(values, factor, most, BOUNDED) * by_col[None, :]
        square = u * u
        old = tl.load(by_row + row, mask=own, other=0.0) * scale
        norm = tl.abs(old) * tl.sqrt(tl.sum(square, axis=1))
        new = old * (root / tl.where(norm < least, least, norm))  # NaN stays NaN
        new = tl.where(own, tl.where(new > LARGEST_FACTOR, LARGEST_FACTOR, new), 0.0)
        tl.store(out + row, new, mask=own)
        sums += tl.sum(square * (new * new)[:, None], axis=0)
    tl.store(vectors(t, PART, tl.float32, ALIGNED) + tile * cols + j, sums, mask=j < cols)


@triton.jit
def normalize(t, tile, P: tl.constexpr):
    """out ← in2 · a / max(sqrt(in), eps), n elements: factors that change norms sqrt(in) to a."""
    TC: tl.constexpr = P.TC
    at = tile * TC + tl.arange(0, TC)
    has = at < integer(t, N)
    sums = tl.load(pointer(t, IN, tl.float32) + at, mask=has, other=1.0)
    old = tl.load(pointer(t, IN2, tl.float32) + at, mask=has, other=0.0)
    norm, least = tl.sqrt(sums), number(t, EPS)
    new = old * (number(t, A) / tl.where(norm < least, least, norm))  # NaN stays NaN
    new = tl.where(new > LARGEST_FACTOR, LARGEST_FACTOR, new)
    tl.store(pointer(t, OUT, tl.float32) + at, new, mask=has)


@triton.jit
def copy_checked_values(t, tile, P: tl.constexpr):
    """out ← found, one number."""
    found = tl.load(pointer(t, FOUND, tl.float32))
    tl.store(pointer(t, OUT, tl.float32), found)


@triton.jit
def fold(t, tile, P: tl.constexpr):
    """out[j] ← the sum of part[i · cols + j] over i < rows, for j < n.

    If total is set, out ← the sum of all height elements of part, read as rows of n = TC.
    """
    TR: tl.constexpr = P.TR
    TC: tl.constexpr = P.TC
    j = tile * TC + tl.arange(0, TC)
    rows, cols, height = integer(t, ROWS), integer(t, COLS), integer(t, HEIGHT)
    has = j < integer(t, N)
    sums = tl.zeros([TC], dtype=tl.float32)
    for k in range(0, rows, TR):
        i = k + tl.arange(0, TR)
        at = i[:, None].to(tl.int64) * cols + j[None, :]
        ok = (i < rows)[:, None] & has[None, :] & (at < height)
        x = tl.load(pointer(t, PART, tl.float32) + at, mask=ok, other=0.0)
        sums += tl.sum(x, axis=0)
    out = pointer(t, OUT, tl.float32)
    if integer(t, TOTAL) != 0:
        tl.store(out, tl.sum(sums, axis=0))
    else:
        tl.store(out + j, sums, mask=has)
