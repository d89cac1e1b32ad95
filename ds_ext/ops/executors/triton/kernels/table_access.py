"""Reads a program's parameter, its tile and the tile's addresses.

A launch has a row of integers for each parameter, which describes its tiles, and one argument or
two for each other column: see schema.py. ``t`` is a tuple of the row, the parameter's index in the
arrays of addresses, and these arguments.
"""

import triton
import triton.language as tl

from ds_ext.ops import schema
from ds_ext.ops.executors.triton.kernels import fields as F

# Kernels may only read globals that are constexprs, and modules.
FIELDS = tl.constexpr(len(schema.TILE))
LEAST_ADDRESS = tl.constexpr(2**32)  # of a vector: smaller arguments are numbers themselves


@triton.jit
def parameter_of(rows, count, COUNT: tl.constexpr):
    """Finds this program's parameter -> its row, the program's tile.

    Numbers of programs and tiles have 32 bits: a division of 64 bits is a call of a hundred
    instructions.
    """
    rows = rows.to(tl.int64).to(tl.pointer_type(tl.int64))
    i = tl.arange(0, COUNT)
    first = tl.load(rows + i * FIELDS + F.PROGRAM, mask=i < count, other=2**62)
    program = tl.program_id(0)
    row = rows + (tl.sum((first <= program).to(tl.int32), axis=0) - 1) * FIELDS
    return row, program - tl.load(row + F.PROGRAM).to(tl.int32)


@triton.jit
def integer(t, FIELD: tl.constexpr):
    """The integer of a column of rows."""
    return tl.load(t[0] + FIELD)


@triton.jit
def size(t, FIELD: tl.constexpr):
    """The integer of a column that has 32 bits: of programs, tiles, rows or columns."""
    return integer(t, FIELD).to(tl.int32)


@triton.jit
def divided(a, b):
    """Returns the quotient and the remainder of two numbers of tiles, at least 0."""
    quotient = (tl.cast(a, tl.uint32) // tl.cast(b, tl.uint32)).to(tl.int32)
    return quotient, a - quotient * b


@triton.jit
def address(t, FIELD: tl.constexpr):
    """The address in a column: a base, and the parameter's number in an array of offsets."""
    offsets = t[FIELD + 1].to(tl.int64).to(tl.pointer_type(tl.int64))
    return t[FIELD].to(tl.int64) + tl.load(offsets + t[1])


@triton.jit
def pointer(t, FIELD: tl.constexpr, DTYPE: tl.constexpr):
    """The pointer in a column."""
    return address(t, FIELD).to(tl.pointer_type(DTYPE))


@triton.jit
def number(t, FIELD: tl.constexpr):
    """The number of a column, fp32: the argument's bits, or the parameter's in a vector there."""
    given = t[FIELD].to(tl.int64)
    is_vector = given >= LEAST_ADDRESS
    own = tl.load(given.to(tl.pointer_type(tl.float32)) + t[1], mask=is_vector, other=0.0)
    return tl.where(is_vector, own, given.to(tl.int32).to(tl.float32, bitcast=True))


# Triton's interpreter truncates to bf16, and has no instructions of a GPU.
INTERPRETED = tl.constexpr(not isinstance(number, triton.JITFunction))


@triton.jit
def rows_of(t, tile, height):
    """A row tile of so many rows -> its matrix, the first of its rows in the matrix."""
    mat, high = divided(tile, size(t, F.DOWN))
    return integer(t, F.MAT0) + mat, size(t, F.ROW0) + high * height


@triton.jit
def elements_of(t, mat, top, c, P: tl.constexpr):
    """Elements [TR, TC] of rows [top, top + TR) of a matrix and columns [c, c + TC).

    Returns the offsets of the rows in the run [TR, 1] and the mask of the run's elements [TR, TC].
    The mask of aligned runs compares numbers of vectors, which have 32 bits, so that it is computed
    once for a vector.
    """
    i, k = tl.arange(0, P.TR), tl.arange(0, P.TC)
    begin = first_of(t, mat, top, c) + (i.to(tl.uint64) * size(t, F.COLS).to(tl.uint32)).to(
        tl.int64
    )
    n, left = integer(t, F.N), size(t, F.COLS) - c
    if P.ALIGNED:
        vector = (begin >> 4).to(tl.int32)[:, None] + (k // 16)[None, :]
        ok = (vector >= 0) & (vector < (n >> 4).to(tl.int32)) & (k // 16 < left // 16)[None, :]
    else:
        e = begin[:, None] + k[None, :]
        ok = (e >= 0) & (e < n) & (k < left)[None, :]
    return hinted(begin, P)[:, None], ok & (i < size(t, F.ROWS) - top)[:, None]


@triton.jit
def first_of(t, mat, top, c):
    """The index in the run of the element at row ``top`` and column c; outside [0, n) if none."""
    return (mat * integer(t, F.ROWS) + top) * integer(t, F.COLS) + c - integer(t, F.START)


@triton.jit
def hinted(x, P: tl.constexpr):
    """x, with a hint to the compiler that it is a multiple of 16 if ALIGNED.

    The compiler understands the shifts; it loses multiple_of hints of arguments when it inlines.
    """
    if P.ALIGNED:
        x = (x >> 4) << 4
    return x


@triton.jit
def vectors(t, FIELD: tl.constexpr, DTYPE: tl.constexpr, P: tl.constexpr):
    """The pointer in a column, with a hint that it is aligned to 16 bytes if ALIGNED.

    It does not call ``pointer``, because Triton before 3.9 loses hints about results.
    """
    found = address(t, FIELD).to(tl.pointer_type(DTYPE))
    if P.ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def run_at(t, FIELD: tl.constexpr, DTYPE: tl.constexpr, e, P: tl.constexpr):
    """Pointers to the elements of a tile whose rows begin at e."""
    return vectors(t, FIELD, DTYPE, P) + e + tl.arange(0, P.TC)[None, :]
