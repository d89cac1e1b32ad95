"""Reads a program's parameter, its tile and the tile's addresses from the table.

Every launch has a table of int64, one row per parameter and pass: see columns.py. It holds integers
and addresses: of tensors, and of numbers, which are fp32 on the device.
"""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.columns import COLUMNS

# The index of each column in a row. Kernels may only read globals that are constexprs.
FIELD = {name: i for i, name in enumerate(COLUMNS)}
FIELDS = tl.constexpr(len(COLUMNS))
PROGRAM, KIND = tl.constexpr(FIELD["program"]), tl.constexpr(FIELD["kind"])
START, N, ORIGIN = (tl.constexpr(FIELD[k]) for k in ("start", "n", "origin"))
ROWS, COLS, DOWN = (tl.constexpr(FIELD[k]) for k in ("rows", "cols", "down"))
ROW0, MAT0, HEIGHT = (tl.constexpr(FIELD[k]) for k in ("row0", "mat0", "height"))
TOTAL, MATS = tl.constexpr(FIELD["total"]), tl.constexpr(FIELD["mats"])
X, ROW, COL, M, V = (tl.constexpr(FIELD[k]) for k in ("x", "row", "col", "m", "v"))
M_SCALE, V_SCALE = (tl.constexpr(FIELD[k]) for k in ("m_scale", "v_scale"))
W, AUX, BEFORE = (tl.constexpr(FIELD[k]) for k in ("w", "aux", "before"))
KEY, NOISE = tl.constexpr(FIELD["key"]), tl.constexpr(FIELD["noise"])
OUT, OUT2 = tl.constexpr(FIELD["out"]), tl.constexpr(FIELD["out2"])
IN, IN2, IN3 = (tl.constexpr(FIELD[k]) for k in ("in", "in2", "in3"))
PART, PART2 = (tl.constexpr(FIELD[k]) for k in ("part", "part2"))
FACTOR, BOUND, SCALE = (tl.constexpr(FIELD[k]) for k in ("factor", "bound", "scale"))
LERP, LERP1, LERP2 = (tl.constexpr(FIELD[k]) for k in ("lerp", "lerp1", "lerp2"))
A, B, DECAY = (tl.constexpr(FIELD[k]) for k in ("a", "b", "decay"))
LR, EPS = tl.constexpr(FIELD["lr"]), tl.constexpr(FIELD["eps"])
CLIP, MOST = tl.constexpr(FIELD["clip"]), tl.constexpr(FIELD["most"])
PROBE, FOUND = tl.constexpr(FIELD["probe"]), tl.constexpr(FIELD["found"])
GIVEN = tl.constexpr(FIELD["given0"])


@triton.jit
def parameter_of(table, count, COUNT: tl.constexpr, PASSES: tl.constexpr):
    """Finds this program's parameter -> the first of its table rows, the program's tile.

    A parameter has one row for each pass. Numbers of programs and tiles have 32 bits: a division of
    64 bits is a call of a hundred instructions.
    """
    i = tl.arange(0, COUNT)
    first = tl.load(table + i * (PASSES * FIELDS) + PROGRAM, mask=i < count, other=2**62)
    program = tl.program_id(0)
    at = tl.sum((first <= program).to(tl.int32), axis=0) - 1
    t = table + at * (PASSES * FIELDS)
    return t, program - size(t, PROGRAM)


@triton.jit
def size(t, FIELD: tl.constexpr):
    """The integer of a column that has 32 bits: of programs, tiles, rows or columns."""
    return tl.load(t + FIELD).to(tl.int32)


@triton.jit
def divided(a, b):
    """Returns the quotient and the remainder of two numbers of tiles, at least 0."""
    quotient = (tl.cast(a, tl.uint32) // tl.cast(b, tl.uint32)).to(tl.int32)
    return quotient, a - quotient * b


@triton.jit
def pointer(t, FIELD: tl.constexpr, DTYPE: tl.constexpr):
    """The pointer in a column."""
    return tl.load(t + FIELD).to(tl.pointer_type(DTYPE))


@triton.jit
def number(t, FIELD: tl.constexpr):
    """The number of a column, fp32."""
    return tl.load(pointer(t, FIELD, tl.float32))


# Triton's interpreter truncates to bf16, and has no instructions of a GPU.
INTERPRETED = tl.constexpr(not isinstance(number, triton.JITFunction))


@triton.jit
def number_or_formula(t, FIELD: tl.constexpr, FORMULA: tl.constexpr):
    """The number of a column, or the value of its formula, fp32."""
    if FORMULA is None:
        found = number(t, FIELD)
    else:
        found = _evaluated(t, FORMULA)
    return found


@triton.jit
def _evaluated(t, F: tl.constexpr):
    """Evaluates a formula of formulas.py, rounded as torch rounds it."""
    a: tl.constexpr = F.a
    b: tl.constexpr = F.b
    if F.name == "given":
        found = number(t, GIVEN + a)
    elif F.name == "add":
        found = _evaluated(t, a) + _evaluated(t, b)
    elif F.name == "sub":
        found = _evaluated(t, a) - _evaluated(t, b)
    elif F.name == "mul":
        found = _evaluated(t, a) * _evaluated(t, b)
    elif F.name == "div":
        found = tl.div_rn(_evaluated(t, a), _evaluated(t, b))
    elif F.name == "sqrt":
        found = tl.sqrt_rn(_evaluated(t, a))
    elif F.name == "at_least":  # NaN stays NaN, here and below
        x, bound = _evaluated(t, a), _evaluated(t, b)
        found = tl.where(x < bound, bound, x)
    elif F.name == "at_most":
        x, bound = _evaluated(t, a), _evaluated(t, b)
        found = tl.where(x > bound, bound, x)
    elif F.name == "gt":
        found = _evaluated(t, a) > _evaluated(t, b)
    elif F.name == "and":
        found = _evaluated(t, a) & _evaluated(t, b)
    else:
        tl.static_assert(F.name == "where")
        c: tl.constexpr = F.c
        found = tl.where(_evaluated(t, a), _evaluated(t, b), _evaluated(t, c))
    return found


@triton.jit
def rows_of(t, tile, height):
    """A row tile of so many rows -> its matrix, the first of its rows in the matrix."""
    mat, high = divided(tile, size(t, DOWN))
    return tl.load(t + MAT0) + mat, size(t, ROW0) + high * height


@triton.jit
def elements_of(t, mat, top, c, TR: tl.constexpr, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements [TR, TC] of rows [top, top + TR) of a matrix and columns [c, c + TC).

    Returns the offsets of the rows in the run [TR, 1] and the mask of the run's elements [TR, TC].
    The mask of aligned runs compares numbers of vectors, which have 32 bits, so that it is computed
    once for a vector.
    """
    i, k = tl.arange(0, TR), tl.arange(0, TC)
    begin = first_of(t, mat, top, c) + (i.to(tl.uint64) * size(t, COLS).to(tl.uint32)).to(tl.int64)
    n, left = tl.load(t + N), size(t, COLS) - c
    if ALIGNED:
        vector = (begin >> 4).to(tl.int32)[:, None] + (k // 16)[None, :]
        ok = (vector >= 0) & (vector < (n >> 4).to(tl.int32)) & (k // 16 < left // 16)[None, :]
    else:
        e = begin[:, None] + k[None, :]
        ok = (e >= 0) & (e < n) & (k < left)[None, :]
    return hinted(begin, ALIGNED)[:, None], ok & (i < size(t, ROWS) - top)[:, None]


@triton.jit
def first_of(t, mat, top, c):
    """The index in the run of the element at row ``top`` and column c; outside [0, n) if none."""
    return (mat * tl.load(t + ROWS) + top) * tl.load(t + COLS) + c - tl.load(t + START)


@triton.jit
def hinted(x, ALIGNED: tl.constexpr):
    """x, with a hint to the compiler that it is a multiple of 16 if ALIGNED.

    The compiler understands the shifts; it loses multiple_of hints of arguments when it inlines.
    """
    if ALIGNED:
        x = (x >> 4) << 4
    return x


@triton.jit
def vectors(t, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in a column, with a hint that it is aligned to 16 bytes if ALIGNED."""
    pointer = tl.load(t + FIELD).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def run_at(t, FIELD: tl.constexpr, DTYPE: tl.constexpr, e, TC: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to the elements of a tile whose rows begin at e."""
    return vectors(t, FIELD, DTYPE, ALIGNED) + e + tl.arange(0, TC)[None, :]
