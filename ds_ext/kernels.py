"""The passes of ops.py as Triton kernels, each over all parameters of a bucket at once.

A kernel gets a table of int64, a row for each parameter: its geometry, the addresses of its
tensors and of its numbers, which are fp32 on the device (``FIELD``). A program finds the parameter
that its tile belongs to, and works on [TR, TC] elements of one matrix. What a pass reads is told
by constants (``form``, dtypes); one function, ``_value``, computes it for all passes. Sums are of
fp32 and in an order that depends on the geometry alone: each tile leaves its partial sums, and
``fold`` adds them up. No atomics.
"""

import triton
import triton.language as tl

# Columns of the table.
_FIELDS = (
    # geometry: first program; run [start, start + n) of the matrices as they are laid out here,
    # and where the run starts in the parameter; rows and columns of a matrix; row tiles of one
    # matrix, counted from row0 of matrix mat0, and rows of all tiles
    *("first", "start", "n", "origin", "rows", "cols", "down", "row0", "mat0", "height"),
    # tensors: a gradient or another run; factors of a quotient; moments; a weight and what else is
    # kept of it, the key of its noise; statistics before the step; what is written
    *("x", "row", "col", "m", "v", "w", "aux", "key", "before", "out", "part", "part2"),
    # numbers
    *("factor", "bound", "scale", "weight", "beta1", "beta2", "a", "b", "decay", "share", "lr"),
)
FIELD = {name: i for i, name in enumerate(_FIELDS)}
FIELDS = tl.constexpr(len(_FIELDS))
FIRST, START, N, ORIGIN = (tl.constexpr(FIELD[k]) for k in ("first", "start", "n", "origin"))
ROWS, COLS, DOWN = (tl.constexpr(FIELD[k]) for k in ("rows", "cols", "down"))
ROW0, MAT0, HEIGHT, X = (tl.constexpr(FIELD[k]) for k in ("row0", "mat0", "height", "x"))
ROW, COL, M, V = (tl.constexpr(FIELD[k]) for k in ("row", "col", "m", "v"))
W, AUX, KEY, BEFORE = (tl.constexpr(FIELD[k]) for k in ("w", "aux", "key", "before"))
OUT, PART, PART2 = (tl.constexpr(FIELD[k]) for k in ("out", "part", "part2"))
FACTOR, BOUND, SCALE = (tl.constexpr(FIELD[k]) for k in ("factor", "bound", "scale"))
WEIGHT, BETA1, BETA2 = (tl.constexpr(FIELD[k]) for k in ("weight", "beta1", "beta2"))
A, B, DECAY = (tl.constexpr(FIELD[k]) for k in ("a", "b", "decay"))
SHARE, LR = (tl.constexpr(FIELD[k]) for k in ("share", "lr"))

# What is read: see ``_value``.
IS_WEIGHT, IS_RUN, IS_QUOTIENT, IS_VECTOR = (tl.constexpr(i) for i in range(4))
IS_RESIDUAL, IS_ADAM_STEP, IS_ADAM = (tl.constexpr(i) for i in range(4, 7))
# How a weight is kept.
PLAIN, STOCHASTIC, SPLIT, COPIED = (tl.constexpr(i) for i in range(4))

TR, TC = 32, 128  # of a tile
STRIP = 16  # rows of a program that reads whole rows

MOST_BF16 = tl.constexpr(3.3895313892515355e38)
MOST_FP16 = tl.constexpr(65504.0)


@triton.jit
def _parameter(table, count, COUNT: tl.constexpr):
    """The table's row of the parameter that this program works on -> it, the program's tile."""
    i = tl.arange(0, COUNT)
    first = tl.load(table + i * FIELDS + FIRST, mask=i < count, other=2**62)
    program = tl.program_id(0).to(tl.int64)
    at = tl.sum((first <= program).to(tl.int32), axis=0) - 1
    t = table + at * FIELDS
    return t, program - tl.load(t + FIRST)


@triton.jit
def _pointer(t, FIELD: tl.constexpr, DTYPE: tl.constexpr):
    return tl.load(t + FIELD).to(tl.pointer_type(DTYPE))


@triton.jit
def _number(t, FIELD: tl.constexpr):
    return tl.load(_pointer(t, FIELD, tl.float32))


@triton.jit
def _rows_of(t, tile, TR: tl.constexpr):
    """Rows of a row tile -> its matrix, the rows in that matrix [TR], those that exist [TR]."""
    down = tl.load(t + DOWN)
    mat = tl.load(t + MAT0) + tile // down
    r = tl.load(t + ROW0) + (tile % down) * TR + tl.arange(0, TR)
    return mat, r, r < tl.load(t + ROWS)


@triton.jit
def _elements(t, mat, r, has_row, c, TC: tl.constexpr):
    """Elements [TR, TC] of rows r, columns c and on -> where in the run, which it has, columns."""
    rows, cols = tl.load(t + ROWS), tl.load(t + COLS)
    j = c + tl.arange(0, TC)
    e = ((mat * rows + r) * cols - tl.load(t + START))[:, None] + j[None, :]
    ok = has_row[:, None] & (j < cols)[None, :] & (e >= 0) & (e < tl.load(t + N))
    return e, ok, j


@triton.jit
def _weight(t, e, ok, WD: tl.constexpr, KEPT: tl.constexpr):
    """Weights, in fp32."""
    run = tl.load(_pointer(t, W, WD) + e, mask=ok, other=0.0)
    x = run.to(tl.float32)
    if KEPT == SPLIT:
        rest = tl.load(_pointer(t, AUX, tl.int16) + e, mask=ok, other=0).to(tl.int32)
        x = (x.to(tl.int32, bitcast=True) + rest).to(tl.float32, bitcast=True)
    if KEPT == COPIED:
        copy = tl.load(_pointer(t, AUX, tl.float32) + e, mask=ok, other=0.0)
        x = tl.where(copy.to(WD) == run, copy, x)
    return x


@triton.jit
def _mixed(x):
    """The permutation of the numbers below 2**16 that precision.py reads its noise from."""
    x = ((x ^ (x >> 7)) * 0x2993) & 0xFFFF
    x = ((x ^ (x >> 5)) * 0xE877) & 0xFFFF
    x = ((x ^ (x >> 9)) * 0x0235) & 0xFFFF
    return x ^ (x >> 10)


@triton.jit
def _noise(t, e):
    """precision.add_noise_: random numbers in [0, 2**16), the same for the same key, element."""
    element = e + tl.load(t + ORIGIN)
    h = (tl.load(t + KEY) + (element >> 16) * 0xC2B2AE3D).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16)
    return _mixed((h + element.to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def _is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def _to_nearest(x, WD: tl.constexpr):
    """fp32 in the dtype of a weight; ties to even. Triton's interpreter only cuts bf16 off."""
    if WD == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, near.to(tl.float32, bitcast=True), x)
    return x.to(WD)


@triton.jit
def _store_weight(t, e, ok, new, WD: tl.constexpr, KEPT: tl.constexpr):
    """Writes fp32 weights back: precision.py says how each kind rounds."""
    w = _pointer(t, W, WD) + e
    if KEPT == SPLIT:
        bits = new.to(tl.int32, bitcast=True)
        bits = tl.where(new != new, 0x7FC00000, bits)
        upper = ((bits + 0x8000) >> 16).to(tl.int16)
        tl.store(_pointer(t, AUX, tl.int16) + e, bits.to(tl.int16), mask=ok)
        tl.store(w, upper.to(WD, bitcast=True), mask=ok)
    elif KEPT == COPIED:
        tl.store(_pointer(t, AUX, tl.float32) + e, new, mask=ok)
        tl.store(w, new.to(WD), mask=ok)
    elif KEPT == STOCHASTIC and WD == tl.bfloat16:
        bounded = tl.minimum(tl.maximum(new, -MOST_BF16), MOST_BF16)
        bits = (bounded.to(tl.int32, bitcast=True) + _noise(t, e)) & -0x10000
        rounded = bits.to(tl.float32, bitcast=True)
        tl.store(w, tl.where(_is_finite(new), rounded, new).to(WD), mask=ok)
    elif KEPT == STOCHASTIC:
        bounded = tl.minimum(tl.maximum(new, -MOST_FP16), MOST_FP16)
        power = (bounded.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        spacing = tl.maximum(power, 2.0**-14) * 2.0**-10
        steps = tl.abs(bounded) / spacing
        whole = steps.to(tl.int32).to(tl.float32)
        cut = ((steps - whole) * 65536.0).to(tl.int32)
        whole += (_noise(t, e) < cut).to(tl.float32)
        rounded = tl.where(bounded < 0, -whole, whole) * spacing
        tl.store(w, tl.where(_is_finite(new), rounded, new).to(WD), mask=ok)
    else:
        tl.store(w, _to_nearest(new, WD), mask=ok)


@triton.jit
def _value(
    t, e, ok, mat, r, has_row, j,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What a pass reads, [TR, TC] in fp32; 0 outside of the run. Moments are advanced by it.

    IS_WEIGHT: the weights. IS_RUN: x · factor within ± bound. IS_QUOTIENT: that · row · col;
    IS_VECTOR: / sqrt(v), a run; IS_RESIDUAL: that quotient less the momentum. IS_ADAM: from m and
    v; IS_ADAM_STEP: after they were advanced by x. All · scale; DECAYS: + decay · weights.
    """
    if FORM == IS_WEIGHT:
        u = _weight(t, e, ok, WD, KEPT)
    else:
        if FORM != IS_ADAM:
            u = tl.load(_pointer(t, X, XD) + e, mask=ok, other=0.0).to(tl.float32)
            u = u * _number(t, FACTOR)
            if BOUNDED:
                most = _number(t, BOUND)
                u = tl.where(u > most, most, tl.where(u < -most, -most, u))
        if FORM == IS_QUOTIENT or FORM == IS_RESIDUAL:
            rows, cols = tl.load(t + ROWS), tl.load(t + COLS)
            row = tl.load(_pointer(t, ROW, tl.float32) + mat * rows + r, mask=has_row, other=0.0)
            col = tl.load(_pointer(t, COL, tl.float32) + mat * cols + j, mask=j < cols, other=0.0)
            u = u * col[None, :] * row[:, None]
        if FORM == IS_VECTOR:
            u = u * tl.rsqrt(tl.load(_pointer(t, V, tl.float32) + e, mask=ok, other=1.0))
        if FORM == IS_RESIDUAL:
            at = _pointer(t, M, tl.float32) + e
            m = tl.load(at, mask=ok, other=0.0)
            m += _number(t, WEIGHT) * (u - m)
            tl.store(at, m, mask=ok)
            u = u - m
        if FORM == IS_ADAM_STEP or FORM == IS_ADAM:
            at_m, at_v = _pointer(t, M, tl.float32) + e, _pointer(t, V, tl.float32) + e
            m = tl.load(at_m, mask=ok, other=0.0)
            v = tl.load(at_v, mask=ok, other=1.0)
            if FORM == IS_ADAM_STEP:
                m += _number(t, BETA1) * (u - m)
                v += _number(t, BETA2) * (u * u - v)
                tl.store(at_m, m, mask=ok)
                tl.store(at_v, v, mask=ok)
            u = m / (tl.sqrt(v) * _number(t, A) + _number(t, B))
        u = u * _number(t, SCALE)
        if DECAYS:
            u = u + _number(t, DECAY) * _weight(t, e, ok, WD, KEPT)
    return tl.where(ok, u, 0.0)


@triton.jit
def squares(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Leaves the sum of the squares of each tile in part, [tiles]."""
    t, tile = _parameter(table, count, COUNT)
    across = tl.cdiv(tl.load(t + COLS), TC)
    mat, r, has_row = _rows_of(t, tile // across, TR)
    e, ok, j = _elements(t, mat, r, has_row, (tile % across) * TC, TC)
    u = _value(t, e, ok, mat, r, has_row, j, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
    tl.store(_pointer(t, PART, tl.float32) + tile, tl.sum(tl.sum(u * u, axis=1), axis=0))


@triton.jit
def statistics(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Leaves sums of squares over the columns of a tile in part, [across, row tiles · TR], and
    over its rows in part2, [row tiles, cols]."""
    t, tile = _parameter(table, count, COUNT)
    cols = tl.load(t + COLS)
    across = tl.cdiv(cols, TC)
    down, over = tile // across, tile % across
    mat, r, has_row = _rows_of(t, down, TR)
    e, ok, j = _elements(t, mat, r, has_row, over * TC, TC)
    u = _value(t, e, ok, mat, r, has_row, j, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
    square = u * u
    row = _pointer(t, PART, tl.float32) + over * tl.load(t + HEIGHT) + down * TR + tl.arange(0, TR)
    tl.store(row, tl.sum(square, axis=1))
    tl.store(
        _pointer(t, PART2, tl.float32) + down * cols + j, tl.sum(square, axis=0), mask=j < cols
    )


@triton.jit
def weighed(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Sums of squares over whole rows, to out; and over the rows of a strip, in part, and of those
    divided by before + share · their row's sum, in part2: both [strips, cols].

    A strip is read twice, the second time from the cache.
    """
    t, tile = _parameter(table, count, COUNT)
    rows, cols = tl.load(t + ROWS), tl.load(t + COLS)
    mat, r, has_row = _rows_of(t, tile, TR)
    sums = tl.zeros([TR], dtype=tl.float32)
    for c in range(0, cols, TC):
        e, ok, j = _elements(t, mat, r, has_row, c, TC)
        u = _value(t, e, ok, mat, r, has_row, j, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
        sums += tl.sum(u * u, axis=1)
    begin = (mat * rows + r) * cols - tl.load(t + START)
    own = has_row & (begin >= 0) & (begin < tl.load(t + N))  # rows of the run
    tl.store(_pointer(t, OUT, tl.float32) + mat * rows + r, sums, mask=own)
    before = tl.load(_pointer(t, BEFORE, tl.float32) + mat * rows + r, mask=own, other=1.0)
    weights = 1.0 / (before + _number(t, SHARE) * sums)
    for c in range(0, cols, TC):
        e, ok, j = _elements(t, mat, r, has_row, c, TC)
        u = _value(t, e, ok, mat, r, has_row, j, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
        square = u * u
        at = tile * cols + j
        tl.store(_pointer(t, PART, tl.float32) + at, tl.sum(square, axis=0), mask=j < cols)
        divided = tl.sum(square * weights[:, None], axis=0)
        tl.store(_pointer(t, PART2, tl.float32) + at, divided, mask=j < cols)


@triton.jit
def advance(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """out ← out + share · (u − out), or of u² + b."""
    t, tile = _parameter(table, count, COUNT)
    across = tl.cdiv(tl.load(t + COLS), TC)
    mat, r, has_row = _rows_of(t, tile // across, TR)
    e, ok, j = _elements(t, mat, r, has_row, (tile % across) * TC, TC)
    u = _value(t, e, ok, mat, r, has_row, j, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
    if SQUARED:
        u = u * u + _number(t, B)
    out = _pointer(t, OUT, tl.float32) + e
    m = tl.load(out, mask=ok, other=0.0)
    tl.store(out, m + _number(t, SHARE) * (u - m), mask=ok)


@triton.jit
def apply(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """w ← w − lr · u."""
    t, tile = _parameter(table, count, COUNT)
    across = tl.cdiv(tl.load(t + COLS), TC)
    mat, r, has_row = _rows_of(t, tile // across, TR)
    e, ok, j = _elements(t, mat, r, has_row, (tile % across) * TC, TC)
    u = _value(t, e, ok, mat, r, has_row, j, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
    new = _weight(t, e, ok, WD, KEPT) - _number(t, LR) * u
    _store_weight(t, e, ok, new, WD, KEPT)


@triton.jit
def fold(table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """out[j] ← the sum of part[i · cols + j] over i < rows, for j < n."""
    t, tile = _parameter(table, count, COUNT)
    j = tile * TC + tl.arange(0, TC)
    rows, cols = tl.load(t + ROWS), tl.load(t + COLS)
    has = j < tl.load(t + N)
    total = tl.zeros([TC], dtype=tl.float32)
    for k in range(0, rows, TR):
        i = k + tl.arange(0, TR)
        at = i[:, None].to(tl.int64) * cols + j[None, :]
        x = tl.load(
            _pointer(t, PART, tl.float32) + at, mask=(i < rows)[:, None] & has[None, :], other=0.0
        )
        total += tl.sum(x, axis=0)
    tl.store(_pointer(t, OUT, tl.float32) + j, total, mask=has)
