"""The passes of passes.py as Triton kernels, each over all parameters of a bucket at once.

A kernel gets a table of int64, a row for each parameter: its geometry, the addresses of its
tensors and of its numbers, which are fp32 on the device (``FIELD``). A program finds the parameter
that its tile belongs to, and works on [TR, TC] elements of one matrix. What a pass reads is told
by constants (``form``, dtypes); one function, ``_value``, computes it for all passes. Sums are of
fp32 and in an order that depends on the geometry alone: each tile leaves its partial sums, and
``fold`` adds them up. No atomics.
"""

import triton
import triton.language as tl

from ds_ext.ops.triton.columns import COLUMNS

FIELD = {name: i for i, name in enumerate(COLUMNS)}
FIELDS = tl.constexpr(len(COLUMNS))
FIRST, START, N, ORIGIN = (tl.constexpr(FIELD[k]) for k in ("first", "start", "n", "origin"))
ROWS, COLS, DOWN = (tl.constexpr(FIELD[k]) for k in ("rows", "cols", "down"))
ROW0, MAT0, HEIGHT = (tl.constexpr(FIELD[k]) for k in ("row0", "mat0", "height"))
TOTAL, MATS = tl.constexpr(FIELD["total"]), tl.constexpr(FIELD["mats"])
X, ROW, COL, M, V = (tl.constexpr(FIELD[k]) for k in ("x", "row", "col", "m", "v"))
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
def _elements(t, mat, r, has_row, c, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements [TR, TC] of rows r, columns c and on -> where in the run they begin [TR, 1], which
    of them it has, columns [TC].

    Which it has is told by bounds for each row, so that it is alike within a vector.
    """
    rows, cols = tl.load(t + ROWS), _hinted(tl.load(t + COLS), ALIGNED)
    begin = (mat * rows + r) * cols + c - tl.load(t + START)
    low = tl.minimum(tl.maximum(-begin, 0), TC).to(tl.int32)
    high = tl.minimum(tl.load(t + N) - begin, cols - c)
    high = tl.where(has_row, tl.minimum(tl.maximum(high, 0), TC), 0).to(tl.int32)
    k = tl.arange(0, TC)
    low, high = _hinted(low, ALIGNED)[:, None], _hinted(high, ALIGNED)[:, None]
    ok = (k[None, :] >= low) & (k[None, :] < high)
    return _hinted(begin, ALIGNED)[:, None], ok, c + k


@triton.jit
def _hinted(x, ALIGNED: tl.constexpr):
    """x, which is a multiple of 16 if ALIGNED. The compiler follows the shifts; what multiple_of
    says of an argument is lost as soon as this is inlined.
    """
    if ALIGNED:
        x = (x >> 4) << 4
    return x


@triton.jit
def _vectors(t, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer that is a multiple of 16 bytes if ALIGNED."""
    pointer = tl.load(t + FIELD).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _run(t, FIELD: tl.constexpr, DTYPE: tl.constexpr, e, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the elements of a tile lie whose rows begin at e."""
    return _vectors(t, FIELD, DTYPE, ALIGNED) + e + tl.arange(0, TC)[None, :]


@triton.jit
def _weight(
    t, e, ok, TC: tl.constexpr, ALIGNED: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr
):
    """Weights, in fp32."""
    if KEPT == SPLIT:
        upper = tl.load(_run(t, W, tl.int16, e, TC, ALIGNED), mask=ok, other=0).to(tl.int32)
        rest = tl.load(_run(t, AUX, tl.int16, e, TC, ALIGNED), mask=ok, other=0).to(tl.int32)
        x = ((upper << 16) + rest).to(tl.float32, bitcast=True)
    else:
        run = tl.load(_run(t, W, WD, e, TC, ALIGNED), mask=ok, other=0.0)
        x = run.to(tl.float32)
        if KEPT == COPIED:
            copy = tl.load(_run(t, AUX, tl.float32, e, TC, ALIGNED), mask=ok, other=0.0)
            x = tl.where(copy.to(WD) == run, copy, x)
    return x


@triton.jit
def _mixed(x):
    """The permutation of the numbers below 2**16 that rounding.py reads its noise from.

    What lies above 16 bits is cut off where it could get lower, not after each multiplication.
    """
    x = (x ^ ((x >> 7) & 0x1FF)) * 0x2993
    x = (x ^ ((x >> 5) & 0x7FF)) * 0xE877
    x = (x ^ ((x >> 9) & 0x7F)) * 0x0235
    return (x ^ ((x >> 10) & 0x3F)) & 0xFFFF


@triton.jit
def _place(t, chunk):
    """rounding.place: where in the permutation the noise of 2**16 elements starts."""
    h = (tl.load(t + KEY) + chunk * 0xC2B2AE3D).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _noise(t, e, TC: tl.constexpr):
    """rounding.add_noise_: random numbers in [0, 2**16), the same for the same key, element.

    A row of a tile touches two chunks of 2**16 elements at most: their places are found once.
    """
    first = e + tl.load(t + ORIGIN)
    chunk, low = first >> 16, (first & 0xFFFF).to(tl.uint32)
    here, beyond = _place(t, chunk) + low, _place(t, chunk + 1) + low
    k = tl.arange(0, TC)[None, :].to(tl.uint32)
    return _mixed(tl.where(k < 0x10000 - low, here, beyond) + k).to(tl.int32)


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
def _store_weight(
    t, e, ok, new, TC: tl.constexpr, ALIGNED: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr
):
    """Writes fp32 weights back: weight_update.py says how each kind rounds."""
    w = _run(t, W, WD, e, TC, ALIGNED)
    if KEPT == SPLIT:
        bits = new.to(tl.int32, bitcast=True)
        bits = tl.where(new != new, 0x7FC00000, bits)
        upper = ((bits + 0x8000) >> 16).to(tl.int16)
        tl.store(_run(t, AUX, tl.int16, e, TC, ALIGNED), bits.to(tl.int16), mask=ok)
        tl.store(w, upper.to(WD, bitcast=True), mask=ok)
    elif KEPT == COPIED:
        tl.store(_run(t, AUX, tl.float32, e, TC, ALIGNED), new, mask=ok)
        tl.store(w, new.to(WD), mask=ok)
    elif KEPT == STOCHASTIC and WD == tl.bfloat16:
        bounded = tl.minimum(tl.maximum(new, -MOST_BF16), MOST_BF16)
        bits = (bounded.to(tl.int32, bitcast=True) + _noise(t, e, TC)) & -0x10000
        rounded = bits.to(tl.float32, bitcast=True)
        tl.store(w, tl.where(_is_finite(new), rounded, new).to(WD), mask=ok)
    elif KEPT == STOCHASTIC:
        bounded = tl.minimum(tl.maximum(new, -MOST_FP16), MOST_FP16)
        power = (bounded.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        spacing = tl.maximum(power, 2.0**-14) * 2.0**-10
        steps = tl.abs(bounded) / spacing
        whole = steps.to(tl.int32).to(tl.float32)
        cut = ((steps - whole) * 65536.0).to(tl.int32)
        whole += (_noise(t, e, TC) < cut).to(tl.float32)
        rounded = tl.where(bounded < 0, -whole, whole) * spacing
        tl.store(w, tl.where(_is_finite(new), rounded, new).to(WD), mask=ok)
    else:
        tl.store(w, _to_nearest(new, WD), mask=ok)


@triton.jit
def _factors(t, BOUNDED: tl.constexpr):
    """What a run is multiplied by, and its bound if it has one."""
    factor = _number(t, FACTOR)
    most = factor
    if BOUNDED:
        most = _number(t, BOUND)
    return factor, most


@triton.jit
def _scaled(x, factor, most, BOUNDED: tl.constexpr):
    """x · factor within ± most, in fp32."""
    u = x.to(tl.float32) * factor
    if BOUNDED:
        u = tl.where(u > most, most, tl.where(u < -most, -most, u))
    return u


@triton.jit
def _value(
    t, e, ok, mat, r, has_row, j, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What a pass reads, [TR, TC] in fp32; 0 outside of the run. Moments are advanced by it.

    IS_WEIGHT: the weights. IS_RUN: x · factor within ± bound. IS_QUOTIENT: that · row · col;
    IS_VECTOR: / sqrt(v), a run. IS_ADAM: from m and v; IS_ADAM_STEP: after they were advanced by
    x. All · scale. IS_RESIDUAL: the quotient less the momentum. DECAYS: + decay · weights.
    """
    if FORM == IS_WEIGHT:
        u = _weight(t, e, ok, TC, ALIGNED, WD, KEPT)
    else:
        if FORM != IS_ADAM:
            x = tl.load(_run(t, X, XD, e, TC, ALIGNED), mask=ok, other=0.0)
            factor, most = _factors(t, BOUNDED)
            u = _scaled(x, factor, most, BOUNDED)
        if FORM == IS_QUOTIENT or FORM == IS_RESIDUAL:
            rows, cols = tl.load(t + ROWS), _hinted(tl.load(t + COLS), ALIGNED)
            row = tl.load(_pointer(t, ROW, tl.float32) + mat * rows + r, mask=has_row, other=0.0)
            at_col = _vectors(t, COL, tl.float32, ALIGNED) + mat * cols + j
            col = tl.load(at_col, mask=j < cols, other=0.0)
            u = u * col[None, :] * row[:, None]
        if FORM == IS_VECTOR:
            u = u * tl.rsqrt(tl.load(_run(t, V, tl.float32, e, TC, ALIGNED), mask=ok, other=1.0))
        if FORM == IS_RESIDUAL:
            u = u * _number(t, SCALE)
            at = _run(t, M, tl.float32, e, TC, ALIGNED)
            m = tl.load(at, mask=ok, other=0.0)
            m += _number(t, WEIGHT) * (u - m)
            tl.store(at, m, mask=ok)
            u = u - m
        if FORM == IS_ADAM_STEP or FORM == IS_ADAM:
            at_m = _run(t, M, tl.float32, e, TC, ALIGNED)
            at_v = _run(t, V, tl.float32, e, TC, ALIGNED)
            m = tl.load(at_m, mask=ok, other=0.0)
            v = tl.load(at_v, mask=ok, other=1.0)
            if FORM == IS_ADAM_STEP:
                m += _number(t, BETA1) * (u - m)
                v += _number(t, BETA2) * (u * u - v)
                tl.store(at_m, m, mask=ok)
                tl.store(at_v, v, mask=ok)
            u = m / (tl.sqrt(v) * _number(t, A) + _number(t, B))
        if FORM != IS_RESIDUAL:
            u = u * _number(t, SCALE)
        if DECAYS:
            u = u + _number(t, DECAY) * _weight(t, e, ok, TC, ALIGNED, WD, KEPT)
    return tl.where(ok, u, 0.0)


@triton.jit
def _read(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """What this program reads -> its parameter, its tile, where its rows begin in the run, which
    elements that has, their values.
    """
    t, tile = _parameter(table, count, COUNT)
    across = tl.cdiv(tl.load(t + COLS), TC)
    mat, r, has_row = _rows_of(t, tile // across, TR)
    e, ok, j = _elements(t, mat, r, has_row, (tile % across) * TC, TC, ALIGNED)
    u = _value(t, e, ok, mat, r, has_row, j, TC, ALIGNED, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
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
    tl.store(_pointer(t, PART, tl.float32) + tile, tl.sum(tl.sum(u * u, axis=1), axis=0))


@triton.jit
def statistics(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    FORM: tl.constexpr, XD: tl.constexpr, BOUNDED: tl.constexpr,
    DECAYS: tl.constexpr, WD: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Leaves sums of squares over the columns of a tile in part, [across, row tiles · TR], and
    over its rows in part2, [row tiles, cols].
    """
    t, tile = _parameter(table, count, COUNT)
    cols = _hinted(tl.load(t + COLS), ALIGNED)
    across = tl.cdiv(cols, TC)
    down, over = tile // across, tile % across
    mat, r, has_row = _rows_of(t, down, TR)
    e, ok, j = _elements(t, mat, r, has_row, over * TC, TC, ALIGNED)
    u = _value(t, e, ok, mat, r, has_row, j, TC, ALIGNED, FORM, XD, BOUNDED, DECAYS, WD, KEPT)
    square = u * u
    row = _pointer(t, PART, tl.float32) + over * tl.load(t + HEIGHT) + down * TR + tl.arange(0, TR)
    tl.store(row, tl.sum(square, axis=1))
    col = _vectors(t, PART2, tl.float32, ALIGNED) + down * cols + j
    tl.store(col, tl.sum(square, axis=0), mask=j < cols)


@triton.jit
def weighed(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr,
    XD: tl.constexpr, BOUNDED: tl.constexpr, STRIP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of squares over whole rows, to out; and over the rows of a strip, in part, and of those
    divided by before + share · their row's sum, in part2: both [strips, cols]. Of a run IS_RUN.

    A row is no wider than a tile: it is read once. The loop reads no table: what it loads first
    would use up the stages.
    """
    t, tile = _parameter(table, count, COUNT)
    rows, cols = tl.load(t + ROWS), _hinted(tl.load(t + COLS), ALIGNED)
    down, start, n = tl.load(t + DOWN), tl.load(t + START), tl.load(t + N)
    x, out = _vectors(t, X, XD, ALIGNED), _pointer(t, OUT, tl.float32)
    before, share = _pointer(t, BEFORE, tl.float32), _number(t, SHARE)
    factor, most = _factors(t, BOUNDED)
    mat = tl.load(t + MAT0) + tile // down
    top = tl.load(t + ROW0) + (tile % down) * STRIP
    j = tl.arange(0, TC)
    plain, divided = tl.zeros([TC], dtype=tl.float32), tl.zeros([TC], dtype=tl.float32)
    for i in tl.range(0, STRIP, TR, num_stages=STAGES):
        r = top + i + tl.arange(0, TR)
        row = mat * rows + r
        begin = row * cols - start
        own = (r < rows) & (begin >= 0) & (begin < n)  # rows of the run
        ok = own[:, None] & (j < cols)[None, :]
        values = tl.load(x + _hinted(begin, ALIGNED)[:, None] + j[None, :], mask=ok, other=0.0)
        u = _scaled(values, factor, most, BOUNDED)
        square = u * u
        sums = tl.sum(square, axis=1)
        weights = 1.0 / (tl.load(before + row, mask=own, other=1.0) + share * sums)
        tl.store(out + row, sums, mask=own)
        plain += tl.sum(square, axis=0)
        divided += tl.sum(square * weights[:, None], axis=0)
    at = tile * cols + j
    tl.store(_vectors(t, PART, tl.float32, ALIGNED) + at, plain, mask=j < cols)
    tl.store(_vectors(t, PART2, tl.float32, ALIGNED) + at, divided, mask=j < cols)


@triton.jit
def _advance(t, e, ok, u, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """out ← out + share · (u − out)."""
    out = _run(t, OUT, tl.float32, e, TC, ALIGNED)
    m = tl.load(out, mask=ok, other=0.0)
    tl.store(out, m + _number(t, SHARE) * (u - m), mask=ok)


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
    _advance(t, e, ok, u * u + _number(t, B), TC, ALIGNED)


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
    new = _weight(t, e, ok, TC, ALIGNED, WD, KEPT) - _number(t, LR) * u
    _store_weight(t, e, ok, new, TC, ALIGNED, WD, KEPT)


@triton.jit
def _statistic(t, FIELD: tl.constexpr, SUMS: tl.constexpr, at, has, of):
    """A statistic after it was advanced by a mean of ``of`` squares, as torch.lerp does it."""
    share, eps = _number(t, SHARE), _number(t, B)
    old = tl.load(_pointer(t, FIELD, tl.float32) + at, mask=has, other=1.0)
    mean = tl.load(_pointer(t, SUMS, tl.float32) + at, mask=has, other=0.0) / of + eps
    mean = tl.where(has, mean, 1.0)
    change = mean - old
    new = tl.where(share < 0.5, old + share * change, mean - (1.0 - share) * change)
    tl.store(_pointer(t, FIELD, tl.float32) + at, new, mask=has)
    return new


@triton.jit
def _advance_rows(t, mat, TC: tl.constexpr):
    """row ← row + share · (part / cols + b − row) of a matrix -> its mean; out ← 1 / sqrt(row /
    that).
    """
    rows, cols = tl.load(t + ROWS), tl.load(t + COLS)
    k = tl.arange(0, TC)
    sums = tl.zeros([TC], dtype=tl.float32)
    for r in range(0, rows, TC):
        has = r + k < rows
        new = _statistic(t, ROW, PART, mat * rows + r + k, has, cols.to(tl.float32))
        sums += tl.where(has, new, 0.0)
    mean = tl.sum(sums, axis=0) / rows.to(tl.float32)
    tl.debug_barrier()  # what another thread has stored is read
    for r in range(0, rows, TC):
        at, has = mat * rows + r + k, r + k < rows
        row = tl.load(_pointer(t, ROW, tl.float32) + at, mask=has, other=1.0)
        tl.store(_pointer(t, OUT, tl.float32) + at, tl.rsqrt(row / mean), mask=has)
    return mean


@triton.jit
def _advance_columns(t, mat, c, TC: tl.constexpr):
    """col ← col + share · (part2 / rows + b − col) of TC columns of a matrix, c and on; v ← 1 /
    sqrt(col) -> col, where those columns lie, which of them there are.
    """
    rows, cols = tl.load(t + ROWS), tl.load(t + COLS)
    k = c + tl.arange(0, TC)
    at, has = mat * cols + k, k < cols
    new = _statistic(t, COL, PART2, at, has, rows.to(tl.float32))
    tl.store(_pointer(t, V, tl.float32) + at, tl.rsqrt(new), mask=has)
    return new, at, has


@triton.jit
def factors(table, count, COUNT: tl.constexpr, TC: tl.constexpr):
    """Statistics row and col advanced, of all matrices of a parameter; out ← 1 / sqrt(row / its
    mean), v ← 1 / sqrt(col).
    """
    t, _ = _parameter(table, count, COUNT)
    for mat in range(0, tl.load(t + MATS)):
        _advance_rows(t, mat, TC)
        for c in range(0, tl.load(t + COLS), TC):
            _advance_columns(t, mat, c, TC)


@triton.jit
def clipped_factors(table, count, COUNT: tl.constexpr, TC: tl.constexpr):
    """The same, and out · bound / RMS where that is less than 1, of which x has weighed sums."""
    t, _ = _parameter(table, count, COUNT)
    mats = tl.load(t + MATS)
    squares = tl.zeros([TC], dtype=tl.float32)
    for mat in range(0, mats):
        mean = _advance_rows(t, mat, TC)
        for c in range(0, tl.load(t + COLS), TC):
            new, at, has = _advance_columns(t, mat, c, TC)
            divided = tl.load(_pointer(t, X, tl.float32) + at, mask=has, other=0.0) / new
            squares += mean * tl.where(has, divided, 0.0)
    ratio = _number(t, BOUND) / tl.sqrt(tl.sum(squares, axis=0) * _number(t, A))
    tl.debug_barrier()  # what another thread has stored is read
    _multiply_rows(t, mats * tl.load(t + ROWS), tl.where(ratio > 1, 1.0, ratio), TC)


@triton.jit
def _multiply_rows(t, n, ratio, TC: tl.constexpr):
    """out ← out · ratio, of n elements."""
    out = _pointer(t, OUT, tl.float32)
    for k in range(0, n, TC):
        at = k + tl.arange(0, TC)
        tl.store(out + at, tl.load(out + at, mask=at < n, other=0.0) * ratio, mask=at < n)


@triton.jit
def _factor(k):
    """edits._factors: an odd number for each element of a group."""
    h = (k + 1).to(tl.uint32) * 0x9E3779B1
    h = (h ^ (h >> 15)) * 0x85EBCA77
    return (h | 1).to(tl.int32)


@triton.jit
def _hashed(t, table_tile, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """TR groups of a bf16 run -> its bits [TR, TC], which elements those are, which of them it
    has, the groups [TR], which of them it has, their marks.
    """
    n = tl.load(t + N)
    group = table_tile * TR + tl.arange(0, TR)
    begin = group * TC
    high = tl.minimum(tl.maximum(n - begin, 0), TC).to(tl.int32)
    k = tl.arange(0, TC)
    e = _hinted(begin, ALIGNED)[:, None] + k[None, :]
    ok = k[None, :] < _hinted(high, ALIGNED)[:, None]
    bits = tl.load(_vectors(t, W, tl.int16, ALIGNED) + e, mask=ok, other=0)
    sums = tl.sum(bits.to(tl.int32) * _factor(k)[None, :], axis=1)
    return bits, e, ok, group, begin < n, (sums >> 16).to(tl.int16)


@triton.jit
def mark(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr
):
    """out ← the marks of a bf16 run w."""
    t, tile = _parameter(table, count, COUNT)
    _, _, _, group, has, found = _hashed(t, tile, TR, TC, ALIGNED)
    tl.store(_pointer(t, OUT, tl.int16) + group, found, mask=has)


@triton.jit
def mend(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr
):
    """aux ← 0 where w was changed: edits.mend_. What is left is read only where it may be."""
    t, tile = _parameter(table, count, COUNT)
    bits, e, ok, group, has, found = _hashed(t, tile, TR, TC, ALIGNED)
    size = bits.to(tl.int32) & 0x7FFF
    at = _vectors(t, AUX, tl.int16, ALIGNED) + e
    differs = found != tl.load(_pointer(t, BEFORE, tl.int16) + group, mask=has, other=0)
    differs = (differs & has)[:, None]
    rest = tl.load(at, mask=ok & (_is_odd(size) | differs), other=0)
    zeroed = differs & (size == 0) & (rest != 0)
    some = tl.max(zeroed.to(tl.int32), axis=1)[:, None] > 0
    drop = zeroed | (differs & (some == 0)) | _is_no_number(size, rest)
    tl.store(at, tl.zeros([TR, TC], dtype=tl.int16), mask=ok & drop & (rest != 0))


@triton.jit
def mend_unmarked(
    table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr
):
    """The same of a state without marks: aux ← 0 where the pair stands for no number."""
    t, tile = _parameter(table, count, COUNT)
    bits, e, ok, _, _, _ = _hashed(t, tile, TR, TC, ALIGNED)
    size = bits.to(tl.int32) & 0x7FFF
    at = _vectors(t, AUX, tl.int16, ALIGNED) + e
    rest = tl.load(at, mask=ok & _is_odd(size), other=0)
    drop = _is_no_number(size, rest)
    tl.store(at, tl.zeros([TR, TC], dtype=tl.int16), mask=ok & drop & (rest != 0))


@triton.jit
def _is_odd(size):
    """Whether a weight is 0, infinite or NaN, by its bits without the sign."""
    return (size == 0) | (size >= 0x7F80)


@triton.jit
def _is_no_number(size, rest):
    """Whether a weight and what is left of it stand for no number: 0 less something, inf and more
    or NaN and something.
    """
    drop = ((size == 0) & (rest < 0)) | ((size == 0x7F80) & (rest > 0))
    return drop | ((size > 0x7F80) & (rest != 0))


@triton.jit
def fold(table, count, COUNT: tl.constexpr, TR: tl.constexpr, TC: tl.constexpr):
    """out[j] ← the sum of part[i · cols + j] over i < rows, for j < n; if total, that over all
    elements of part, of which there are height, as rows of n = TC.
    """
    t, tile = _parameter(table, count, COUNT)
    j = tile * TC + tl.arange(0, TC)
    rows, cols, height = tl.load(t + ROWS), tl.load(t + COLS), tl.load(t + HEIGHT)
    has = j < tl.load(t + N)
    sums = tl.zeros([TC], dtype=tl.float32)
    for k in range(0, rows, TR):
        i = k + tl.arange(0, TR)
        at = i[:, None].to(tl.int64) * cols + j[None, :]
        ok = (i < rows)[:, None] & has[None, :] & (at < height)
        x = tl.load(_pointer(t, PART, tl.float32) + at, mask=ok, other=0.0)
        sums += tl.sum(x, axis=0)
    out = _pointer(t, OUT, tl.float32)
    if tl.load(t + TOTAL) != 0:
        tl.store(out, tl.sum(sums, axis=0))
    else:
        tl.store(out + j, sums, mask=has)
