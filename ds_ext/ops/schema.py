"""The columns, forms, storage formats, passes and constants of tables, each written once.

A table has a row for each parameter of a batch. All readers take the layout and the enumerations
from this module: NumPy as a dtype, kernels as constants, C++ from ``header()``.
"""

from typing import NamedTuple

import torch

PROBES = 31  # sampled weights that show whether a cached norm is still valid: see passes.cpp
# sixteen_bit.CorrectedWeight stores the rounding error of a weight in 8 bits: in
# 1/127ths of the largest error, which is half the spacing of the 16-bit numbers there.
ERROR_LEVELS = 127.0
# The value of ±127 in such levels: the middle of 126.5 to 127. With 127, the sum would lie half way
# between two weights, and saving and loading could round it to the other one.
MAX_ERROR_CODE = 126.75
# Below a power of two, numbers lie half as far apart. A larger code towards zero is left from a
# weight that was overwritten since; read as it is, the sum would round to another weight.
MAX_INWARD_CODE = 63.0
HALF = 0.49999  # added before truncation, so that halves round towards the weight
# Scales of 8-bit moments: see companding.py.
SCALE_GROUP = 32  # elements that share a scale
SCALE_CUT = 13  # low mantissa bits of an fp32 that a scale drops
SCALE_FIRST = 83 << 10  # the remaining bits of the smallest scale
MIN_SCALE, MAX_SCALE = 2.0**-44, 2.0**20 - 2.0**9
MIN_ROOT_SCALE = 2.0**-41  # of roots, so that the root of MIN_SQUARE has code 0
# Updates treat a smaller m as 0 and a smaller v as MIN_SQUARE: quotients and roots need no branch.
MIN_MOMENT = MIN_SQUARE = 2.0**-100
# Random bits and hashes: see rounding.py and normal.py.
NOISE_CHUNK = 2**16  # elements that get each 16-bit random number once
NOISE_SHIFTS = 8  # numbers in a vector of 16 bytes
NOISE1, NOISE2, NOISE3 = 0x2993, 0xE877, 0x0235  # multipliers that permute these numbers
# "lowbias32" of C. Wellons, "Prospecting for Hash Functions", 2018.
LOWBIAS1, LOWBIAS2 = 0x7FEB352D, 0x846CA68B
PRIME1, PRIME2, PRIME3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D  # of xxHash: they spread counters
# The constants that passes.cpp reads, by their types there.
CONSTANTS = {
    "int64_t": ("SCALE_GROUP", "NOISE_CHUNK"),
    "int": ("PROBES", "SCALE_CUT"),
    "float": (
        *("ERROR_LEVELS", "MAX_ERROR_CODE", "MAX_INWARD_CODE", "HALF"),
        *("MIN_SCALE", "MAX_SCALE", "MIN_ROOT_SCALE", "MIN_MOMENT", "MIN_SQUARE"),
    ),
    "uint32_t": (
        *("SCALE_FIRST", "NOISE1", "NOISE2", "NOISE3", "LOWBIAS1", "LOWBIAS2"),
        *("PRIME1", "PRIME2", "PRIME3"),
    ),
}


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: its name in Python, C++ and kernels (there in upper case).
        type: its type in C++. A kernel reads int64_t from a table; addresses and numbers are
            arguments of its launch: see ``TILE``.
        meaning: its contents.
    """

    name: str
    type: str
    meaning: str


# Columns from ``x`` to ``out`` are adjacent: launcher.VECTORS and OUT are slices of them.
SHARED = (
    Column("start", "int64_t", "first element of the run [start, start + n) of [mats, rows, cols]"),
    Column("n", "int64_t", "elements in the run"),
    Column("mats", "int64_t", "matrices of the parameter"),
    Column("rows", "int64_t", "rows of a matrix"),
    Column("cols", "int64_t", "columns of a matrix"),
    Column("origin", "int64_t", "index of the run's first element, for random bits"),
    Column("x", "const void *", "the gradient, or another input run"),
    Column("m", "float *", "the first moment: fp32 values, or 8-bit codes"),
    Column("v", "float *", "the second moment: fp32 values, or 8-bit codes"),
    Column("m_scale", "uint16_t *", "scales of the 8-bit codes in m"),
    Column("v_scale", "uint16_t *", "scales of the 8-bit codes in v"),
    Column("w", "void *", "the weights"),
    Column("aux", "void *", "additional data of the storage format of w"),
    Column("out", "float *", "output of the pass"),
    Column("out2", "float *", "second output"),
    Column("row", "float *", "row statistics or factors, [mats, rows]"),
    Column("col", "float *", "column statistics or factors, [mats, cols]"),
    Column("before", "const float *", "row statistics before the step"),
    Column("in", "const float *", "sums over all ranks"),
    Column("in2", "const float *", "second input: further sums or factors"),
    Column("in3", "const float *", "third input"),
    Column("key", "uint64_t", "key of the random bits: rounding.key"),
    Column("factor", "float", "multiplies x"),
    Column("bound", "float", "x · factor is clamped to ± bound"),
    Column("scale", "float", "multiplies the update"),
    Column("lr", "float", "learning rate"),
    Column("decay", "float", "weight decay"),
    Column("lerp1", "float", "the weight of x in m: 1 − beta1"),
    Column("lerp2", "float", "the weight of x² in v: 1 − beta2; for Lion, of x in m"),
    Column(
        "a",
        "float",
        "in Adam's update: m / (sqrt(v) · a + b); in kernels of factors, 1 / elements",
    ),
    Column("b", "float", "in Adam's update, see a"),
    Column("eps", "float", "small constant that keeps divisors above zero"),
    Column("clip", "float", "upper limit of the RMS of the update"),
    Column("lerp", "float", "the weight of the new value in a statistic or moment"),
)
# Columns that only native passes have. Native passes need no columns for partial sums.
NATIVE = (
    Column("out3", "float *", "third output"),
    Column("norm_cache", "float *", "[1 + PROBES]: cached sum of squares, and sampled weights"),
)
# Columns that only kernels have: tiles, partial sums of tiles, and checks of gradients.
KERNELS = (
    Column("noise", "const uint16_t *", "random numbers: rounding.shifted_noise"),
    Column("program", "int64_t", "first program of the parameter"),
    Column("index", "int64_t", "position in the arrays of addresses"),
    Column("down", "int64_t", "tiles per matrix from top to bottom"),
    Column("row0", "int64_t", "first row that the tiles cover"),
    Column("mat0", "int64_t", "first matrix that the tiles cover"),
    Column(
        "height",
        "int64_t",
        "row_col_sums: rows of all tiles, padding included; strips: rows of a strip; "
        "fold: elements to add up",
    ),
    Column("total", "int64_t", "fold: nonzero for a single sum; cached_norm: number of tiles"),
    Column("part", "float *", "partial sums of each tile"),
    Column("part2", "float *", "second partial sums of each tile"),
    Column("probe", "float *", "the first written weight of each tile"),
    Column("found", "float *", "statistic that shows whether the gradient is finite"),
    Column("most", "float", "the pass runs only if found <= most"),
)


class Form(NamedTuple):
    """The form of a pass's input.

    Attributes:
        meaning: a formula of columns. Passes multiply every form by ``scale``, except IS_RUN and
            IS_WEIGHT. They multiply residuals before they subtract m.
        is_by_matrix: whether a value depends on the row and the column of its element.
    """

    meaning: str
    is_by_matrix: bool = False


FORMS = {
    "IS_WEIGHT": Form("the weights"),
    "IS_RUN": Form("x · factor, clamped to ± bound"),
    "IS_QUOTIENT": Form("x · row · col", is_by_matrix=True),
    "IS_VECTOR": Form("x / sqrt(v), with v of the shape of x"),
    "IS_ADAM": Form("m / (sqrt(v) · a + b)"),
    "IS_ADAM_STEP": Form("IS_ADAM after updating m and v with x"),
    "IS_RESIDUAL": Form("IS_QUOTIENT minus the momentum m", is_by_matrix=True),
    "IS_ADAM8_STEP": Form("IS_ADAM_STEP with 8-bit moments"),
    "IS_SIGN_STEP": Form("Lion: sign(m + lerp1 · (x − m)), then m += lerp2 · (x − m)"),
    "IS_SIGN8_STEP": Form("IS_SIGN_STEP with an 8-bit momentum"),
}
DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
# Storage formats of weights and their dtypes: see sixteen_bit.py.
STORAGE = {
    "PLAIN": (torch.float32, torch.bfloat16, torch.float16),
    "STOCHASTIC": (torch.bfloat16, torch.float16),
    "SPLIT": (torch.bfloat16,),
    "COPIED": (torch.float16,),
    "CORRECTED": (torch.bfloat16, torch.float16),
}
PASSES = (
    *("square_sums", "row_col_sums", "weighted_sums", "factors"),
    *("lerp", "square_lerp", "apply"),
)
# The forms that some passes support; other passes support all forms.
READ_BY = {"weighted_sums": {"IS_RUN", "IS_QUOTIENT"}}
BY_MATRIX = {"row_col_sums", "weighted_sums"}  # passes that add up rows and columns
ADD_WEIGHTS = {"square_sums", "apply"}  # passes that can add ``decay`` times the weights
# Arguments that all parameters of a call share.
CALL = ("pass", "form", "dtype", "storage", "decays")

STORED = [(format_, dtype) for format_, dtypes in STORAGE.items() for dtype in dtypes]


# A launch has a table of int64 with the columns TILE, a row for each parameter. Other columns are
# arguments of the launch: a base and an array of offsets for each of ADDRESSES, a number or the
# address of a vector for each of NUMBERS. The kernel has two arguments before these.
KERNEL_COLUMNS = (*SHARED, *KERNELS)
TILE = [one.name for one in KERNEL_COLUMNS if one.type == "int64_t"]
NUMBERS = [one.name for one in KERNEL_COLUMNS if one.type == "float"]
ADDRESSES = [one.name for one in KERNEL_COLUMNS if one.name not in {*TILE, *NUMBERS}]
ARGUMENT = {name: 2 + 2 * i for i, name in enumerate(ADDRESSES)}  # the first of each column
ARGUMENT |= {name: 2 + 2 * len(ADDRESSES) + i for i, name in enumerate(NUMBERS)}
AT = {name: i for i, name in enumerate(TILE)}  # each column's index in a row
ARGUMENTS = 2 + 2 * len(ADDRESSES) + len(NUMBERS)  # their number
LAYOUT = f"{TILE} {ARGUMENT} {[*FORMS]} {[*STORAGE]}"  # what a compiled kernel depends on


def native_columns() -> list[Column]:
    """Returns the columns of native passes; 8-byte columns come first."""
    return sorted((*SHARED, *NATIVE), key=lambda one: one.type in ("float", "uint32_t"))


def header() -> str:
    """Returns the text of schema.h, which passes.cpp includes."""
    columns = [f"{one.type} {one.name};" for one in native_columns()]
    lines = ["#include <cstdint>", "struct Entry {", *columns, "};"]
    lines.append(f"struct Call {{ int {', '.join(CALL)}; }};")
    stored = [f"{format_}_{DTYPES[dtype]}" for format_, dtype in STORED]
    passes = [name.upper() for name in PASSES]
    enums = {"Form": FORMS, "Dtype": DTYPES.values(), "Storage": stored, "Pass": passes}
    lines += [f"enum {name} {{ {', '.join(values)} }};" for name, values in enums.items()]
    for kind, names in CONSTANTS.items():
        literal = {"float": "{}f", "uint32_t": "{:#x}u"}.get(kind, "{}")
        lines += [f"const {kind} {name} = {literal.format(globals()[name])};" for name in names]
    return "\n".join([*lines, ""])
