"""The kernel of all launches: each program makes the passes of its parameter over one tile.

A launch has several kinds of passes. A kind is a pass, ``then`` another pass over the same
elements, and so on. Each pass is a ``Spec``; Triton compiles a kernel for each set of kinds.
"""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels.elementwise import (
    apply,
    lerp,
    measured_apply,
    noting_apply,
    recall,
    square_lerp,
    square_sums,
)
from ds_ext.ops.executors.triton.kernels.factored_kernels import clipped_factors, factors
from ds_ext.ops.executors.triton.kernels.sums import (
    copy_checked_values,
    fold,
    normalize,
    normalize_whole_rows,
    row_col_sums,
    weighted_sums,
)
from ds_ext.ops.executors.triton.kernels.table_access import (
    FIELDS,
    FOUND,
    KIND,
    MOST,
    number,
    parameter_of,
)
from ds_ext.ops.executors.triton.kernels.wide import normalize_wide_rows, wide_weighted_sums


@triton.jit
def run(table, count, COUNT: tl.constexpr, PASSES: tl.constexpr, KINDS: tl.constexpr):
    """Makes up to PASSES passes over each of ``count`` parameters; each pass has a table row."""
    t, tile = parameter_of(table, count, COUNT, PASSES)
    passes: tl.constexpr = KINDS.passes
    if KINDS.number == 0 and KINDS.rest is None:
        _passes(t, tile, passes)
    else:
        _of_this_kind(t, tile, tl.load(t + KIND), KINDS)


@triton.jit
def _of_this_kind(t, tile, kind, KINDS: tl.constexpr):
    passes: tl.constexpr = KINDS.passes
    rest: tl.constexpr = KINDS.rest
    if kind == KINDS.number:
        _passes(t, tile, passes)
    if rest is not None:
        _of_this_kind(t, tile, kind, rest)


@triton.jit
def _passes(t, tile, P: tl.constexpr):
    then: tl.constexpr = P.then
    if P.JUDGED:
        if number(t, FOUND) <= number(t, MOST):  # false for NaN
            _pass(t, tile, P)
    else:
        _pass(t, tile, P)
    if then is not None:
        tl.debug_barrier()  # the next pass may load values that other threads have stored
        _passes(t + FIELDS, tile, then)


@triton.jit
def _pass(t, tile, P: tl.constexpr):
    if P.name == "square_sums":
        square_sums(t, tile, P)
    elif P.name == "row_col_sums":
        row_col_sums(t, tile, P)
    elif P.name == "weighted_sums":
        weighted_sums(t, tile, P)
    elif P.name == "wide_weighted_sums":
        wide_weighted_sums(t, tile, P)
    elif P.name == "normalize_whole_rows":
        normalize_whole_rows(t, tile, P)
    elif P.name == "normalize_wide_rows":
        normalize_wide_rows(t, tile, P)
    elif P.name == "normalize":
        normalize(t, tile, P)
    elif P.name == "factors":
        factors(t, tile, P)
    elif P.name == "clipped_factors":
        clipped_factors(t, tile, P)
    elif P.name == "lerp":
        lerp(t, tile, P)
    elif P.name == "square_lerp":
        square_lerp(t, tile, P)
    elif P.name == "apply":
        apply(t, tile, P)
    elif P.name == "noting_apply":
        noting_apply(t, tile, P)
    elif P.name == "recall":
        recall(t, tile, P)
    elif P.name == "measured_apply":
        measured_apply(t, tile, P)
    elif P.name == "fold":
        fold(t, tile, P)
    else:
        tl.static_assert(P.name == "copy_checked_values")
        copy_checked_values(t, tile, P)
