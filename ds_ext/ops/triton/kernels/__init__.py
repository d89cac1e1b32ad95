"""The passes of passes.py as Triton kernels, each over all parameters of a bucket at once.

A program finds the parameter that its tile belongs to, and works on [TR, TC] elements of one
matrix. What a pass reads is told by constants (``FORM``, dtypes); one function, ``value_of``,
computes it for all passes. Sums are of fp32.
"""

import triton
import triton.language as tl

from ds_ext.ops.triton.kernels.factored import clipped_factors, factors
from ds_ext.ops.triton.kernels.marks import mark, mend, mend_unmarked
from ds_ext.ops.triton.kernels.passes import apply, lerp, measured_apply, square_lerp, squares
from ds_ext.ops.triton.kernels.sums import (
    fold,
    normalize,
    normalize_whole_rows,
    statistics,
    weighed,
)
from ds_ext.ops.triton.kernels.values import (
    IS_ADAM,
    IS_ADAM8_STEP,
    IS_ADAM_STEP,
    IS_QUOTIENT,
    IS_RESIDUAL,
    IS_RUN,
    IS_SIGN8_STEP,
    IS_SIGN_STEP,
    IS_VECTOR,
    IS_WEIGHT,
)
from ds_ext.ops.triton.kernels.weights import COPIED, CORRECTED, PLAIN, SPLIT, STOCHASTIC
from ds_ext.ops.triton.kernels.wide import normalize_wide_rows, wide_weighed

VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])

__all__ = [
    "COPIED",
    "CORRECTED",
    "IS_ADAM",
    "IS_ADAM8_STEP",
    "IS_ADAM_STEP",
    "IS_QUOTIENT",
    "IS_RESIDUAL",
    "IS_RUN",
    "IS_SIGN8_STEP",
    "IS_SIGN_STEP",
    "IS_VECTOR",
    "IS_WEIGHT",
    "PLAIN",
    "SPLIT",
    "STOCHASTIC",
    "VERSION",
    "apply",
    "clipped_factors",
    "factors",
    "fold",
    "lerp",
    "mark",
    "measured_apply",
    "mend",
    "mend_unmarked",
    "normalize",
    "normalize_whole_rows",
    "normalize_wide_rows",
    "square_lerp",
    "squares",
    "statistics",
    "tl",
    "weighed",
    "wide_weighed",
]
