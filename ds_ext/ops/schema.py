"""The columns, forms, storage formats and passes of tables, each written once.

A table has a row for each parameter of a batch. All readers take the layout and the enumerations
from this module: NumPy as a dtype, kernels as constants, C++ from ``executors/native/schema.h``,
which ``make readme`` writes. A test fails if that file is stale.
"""

from pathlib import Path
from typing import NamedTuple

import torch

HEADER = Path(__file__).parent / "executors" / "native" / "schema.h"

GROUP = 256  # weights that share a fingerprint: see fingerprints.py
PROBES = 31  # sampled weights that show whether a cached norm is still valid: see passes.cpp
GIVEN = 12  # the most numbers in the formulas of a kernel's pass
# weight_storage.CorrectedWeight stores the rounding error of a weight in 8 bits: in parts of the
# largest error, which is half the spacing of the 16-bit numbers there.
PARTS = 127.0
# The value of ±127 in such parts: the middle of 126.5 to 127. With 127, the sum would lie half way
# between two weights, and saving and loading could round it to the other one.
MOST = 126.75
HALF = 0.49999  # added before truncation, so that halves round towards the weight


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: its name in Python, C++ and kernels (there in upper case).
        type: its type in C++; a kernel's table is all int64: integers, and addresses, also of
            numbers.
        meaning: its contents.
    """

    name: str
    type: str
    meaning: str

    @property
    def is_number(self) -> bool:
        """Whether the column is an fp32 number."""
        return self.type == "float"


# Columns from ``x`` to ``out`` are adjacent: launcher.VECTORS and OUT are slices of them.
SHARED = (
    Column("start", "int64_t", "the run [start, start + n) of [mats, rows, cols]"),
    Column("n", "int64_t", "its elements"),
    Column("mats", "int64_t", ""),
    Column("rows", "int64_t", ""),
    Column("cols", "int64_t", ""),
    Column("origin", "int64_t", "the number of its first element, for random bits"),
    Column("x", "const void *", "a gradient, or another run that is read"),
    Column("m", "float *", "a moment: a run, or the codes of one of 8 bits"),
    Column("v", "float *", "the second moment, as m"),
    Column("m_scale", "uint16_t *", "the scales of the codes of m"),
    Column("v_scale", "uint16_t *", "the scales of the codes of v"),
    Column("w", "void *", "the weights"),
    Column("aux", "void *", "what is stored beside them, by the storage format"),
    Column("out", "float *", "what a pass writes"),
    Column("out2", "float *", ""),
    Column("row", "float *", "statistics or factors, [mats, rows]"),
    Column("col", "float *", "statistics or factors, [mats, cols]"),
    Column("before", "const float *", "row statistics before the step"),
    Column("in", "const float *", "sums over all ranks"),
    Column("in2", "const float *", ""),
    Column("in3", "const float *", ""),
    Column("marks", "int16_t *", "fingerprints of groups of weights"),
    Column("key", "uint32_t", "of random bits"),
    Column("factor", "float", "of x"),
    Column("bound", "float", "of x · factor"),
    Column("scale", "float", "of an update"),
    Column("lr", "float", ""),
    Column("decay", "float", "weight decay"),
    Column("lerp1", "float", "the weight of x in m: 1 − beta1"),
    Column("lerp2", "float", "the weight of x² in v: 1 − beta2; Lion's of x in m"),
    Column("a", "float", "Adam: m / (sqrt(v) · a + b)"),
    Column("b", "float", ""),
    Column("eps", "float", ""),
    Column("clip", "float", "the largest RMS of an update"),
    Column("lerp", "float", "the weight of what a statistic or moment moves towards"),
)
# Of native passes alone, which need no columns for partial sums.
NATIVE = (
    Column("out3", "float *", ""),
    Column("update_sums", "double *", "[2]: sums of squares of changes and of new weights"),
    Column("norm_cache", "float *", "[1 + PROBES]: a cached norm, and weights that were written"),
)
# Of kernels alone: their tiles, the tiles' partial sums, and verdicts on gradients.
KERNELS = (
    Column("program", "int64_t", "the first program of a parameter"),
    Column("kind", "int64_t", "which of a launch's kinds of passes the parameter's are"),
    Column("down", "int64_t", "row tiles of one matrix, counted from row0 of matrix mat0"),
    Column("row0", "int64_t", ""),
    Column("mat0", "int64_t", ""),
    Column("height", "int64_t", "the rows of all tiles"),
    Column("total", "int64_t", "whether all is one sum, or how many tiles left one"),
    Column("part", "float *", "the sums of each tile"),
    Column("part2", "float *", ""),
    Column("probe", "float *", "weights as they were written, one of each tile"),
    Column("found", "float *", "what tells whether a gradient is good"),
    Column("most", "float", "the largest that may be found of a good gradient"),
    *(Column(f"given{i}", "float", "a number of a formula") for i in range(GIVEN)),
)


class Form(NamedTuple):
    """The form of a pass's input.

    Attributes:
        meaning: a formula of columns. All forms except weights are also multiplied by ``scale``.
        is_by_matrix: whether a value depends on the row and the column of its element.
        advances: whether reading it advances moments.
    """

    meaning: str
    is_by_matrix: bool = False
    advances: bool = False


FORMS = {
    "IS_WEIGHT": Form("the weights"),
    "IS_RUN": Form("x · factor within ± bound"),
    "IS_QUOTIENT": Form("x · row · col", is_by_matrix=True),
    "IS_VECTOR": Form("x / sqrt(v), v being a run"),
    "IS_ADAM": Form("m / (sqrt(v) · a + b)"),
    "IS_ADAM_STEP": Form("the same after x advanced both", advances=True),
    "IS_RESIDUAL": Form("IS_QUOTIENT less the momentum m", is_by_matrix=True, advances=True),
    "IS_VECTOR_RESIDUAL": Form("IS_VECTOR less the momentum m", advances=True),
    "IS_ADAM8_STEP": Form("IS_ADAM_STEP with moments of 8 bits", advances=True),
    "IS_SIGN_STEP": Form(
        "Lion's: sign(m + lerp1 · (x − m)), then m += lerp2 · (x − m)", advances=True
    ),
    "IS_SIGN8_STEP": Form("the same with a momentum of 8 bits", advances=True),
}
DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
# Storage formats of weights and their dtypes: see weight_storage.py.
STORAGE = {
    "PLAIN": (torch.float32, torch.bfloat16, torch.float16),
    "STOCHASTIC": (torch.bfloat16, torch.float16),
    "SPLIT": (torch.bfloat16,),
    "COPIED": (torch.float16,),
    "CORRECTED": (torch.bfloat16, torch.float16),
}
PASSES = (
    *(
        "largest",
        "square_sums",
        "row_col_sums",
        "weighted_sums",
        "factors",
        "advance_1x1",
        "scattered_squares",
    ),
    *("lerp", "square_lerp", "apply", "mark", "mend"),
    *("normalize_whole_rows", "normalize_rows", "normalize_columns"),
)
# The forms that some passes support; other passes support all forms.
READ_BY = {"weighted_sums": {"IS_RUN"}, "normalize_whole_rows": {"IS_QUOTIENT"}}
ADD_WEIGHTS = {"square_sums", "apply"}  # passes that can add ``decay`` times the weights
# Arguments that all parameters of a call share. fresh: the memory for row and column sums is
# uninitialized.
CALL = ("pass", "form", "dtype", "storage", "decays", "fresh")

STORED = [(how, dtype) for how, dtypes in STORAGE.items() for dtype in dtypes]


def native_columns() -> list[Column]:
    """Returns the columns of native passes; 8-byte columns come first."""
    return sorted((*SHARED, *NATIVE), key=lambda one: one.type in ("float", "uint32_t"))


def kernel_columns() -> list[Column]:
    """Returns the columns of kernels."""
    return [*SHARED, *KERNELS]


def header() -> str:
    """Returns the text of ``schema.h``, which passes.cpp includes."""
    lines = [
        "// Written by `make readme` from ds_ext/ops/schema.py. Do not edit.",
        "#include <cstdint>",
        "",
        "// One parameter.",
        "struct Entry {",
    ]
    for one in native_columns():
        space = "" if one.type.endswith("*") else " "
        note = f"  // {one.meaning}" if one.meaning else ""
        lines.append(f"    {one.type}{space}{one.name};{note}")
    stored = [f"{how}_{DTYPES[dtype]}" for how, dtype in STORED]
    lines += ["};", "", "// What is the same for all parameters of a call.", "struct Call {"]
    lines += [f"    int {', '.join(CALL)};", "};", ""]
    for name, values in (
        ("Form", FORMS),
        ("Dtype", DTYPES.values()),
        ("Storage", stored),
        ("Pass", [name.upper() for name in PASSES]),
    ):
        lines += [f"enum {name} {{", *(f"    {value}," for value in values), "};", ""]
    lines += [f"const int64_t GROUP = {GROUP};", f"const int PROBES = {PROBES};"]
    lines += [f"const float PARTS = {PARTS}f, MOST = {MOST}f, HALF = {HALF}f;", ""]
    return "\n".join(lines)
