"""The kernel of all launches: each program runs a pass over one tile of its parameter.

Parameters that need other tiles or loads have a launch of their own. Triton compiles a kernel for
each ``KernelConstants``.
"""

import triton
import triton.language as tl

from ds_ext.ops.executors.triton.kernels import elementwise, sums
from ds_ext.ops.executors.triton.kernels import fields as F
from ds_ext.ops.executors.triton.kernels.table_access import number, parameter_of, pointer
from ds_ext.ops.schema import ARGUMENTS


@triton.jit(do_not_specialize=[*range(ARGUMENTS)])
def run(
    rows: tl.int64, count: tl.int64,
    x: tl.int64, x_at: tl.int64, m: tl.int64, m_at: tl.int64, v: tl.int64, v_at: tl.int64,
    m_scale: tl.int64, m_scale_at: tl.int64, v_scale: tl.int64, v_scale_at: tl.int64,
    w: tl.int64, w_at: tl.int64, aux: tl.int64, aux_at: tl.int64,
    out: tl.int64, out_at: tl.int64, out2: tl.int64, out2_at: tl.int64,
    row: tl.int64, row_at: tl.int64, col: tl.int64, col_at: tl.int64,
    before: tl.int64, before_at: tl.int64, in_: tl.int64, in_at: tl.int64,
    in2: tl.int64, in2_at: tl.int64, in3: tl.int64, in3_at: tl.int64,
    key: tl.int64, key_at: tl.int64, noise: tl.int64, noise_at: tl.int64,
    part: tl.int64, part_at: tl.int64,
    part2: tl.int64, part2_at: tl.int64, probe: tl.int64, probe_at: tl.int64,
    found: tl.int64, found_at: tl.int64,
    factor: tl.int64, bound: tl.int64, scale: tl.int64, lr: tl.int64, decay: tl.int64,
    lerp1: tl.int64, lerp2: tl.int64, a: tl.int64, b: tl.int64, eps: tl.int64, clip: tl.int64,
    lerp: tl.int64, most: tl.int64,
    COUNT: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Runs a pass over ``count`` parameters; skips those whose gradients are bad.

    ``rows`` is the address of a row of integers for each parameter. The other arguments are the
    columns of schema.py.
    """
    own, tile = parameter_of(rows, count, COUNT)
    t = (
        own, tl.load(own + F.INDEX), x, x_at, m, m_at, v, v_at, m_scale, m_scale_at,
        v_scale, v_scale_at, w, w_at, aux, aux_at, out, out_at, out2, out2_at, row, row_at,
        col, col_at, before, before_at, in_, in_at, in2, in2_at, in3, in3_at,
        key, key_at, noise, noise_at, part, part_at, part2, part2_at, probe, probe_at,
        found, found_at, factor, bound, scale, lr, decay, lerp1, lerp2, a, b, eps, clip, lerp, most,
    )  # fmt: skip
    if P.SKIPS_BAD_GRADIENTS:
        if tl.load(pointer(t, F.FOUND, tl.float32)) <= number(t, F.MOST):  # false for NaN
            _pass(t, tile, P)
    else:
        _pass(t, tile, P)


@triton.jit
def _pass(t, tile, P: tl.constexpr):
    if P.name == "square_sums":
        elementwise.square_sums(t, tile, P)
    elif P.name == "row_col_sums":
        sums.row_col_sums(t, tile, P)
    elif P.name == "weighted_sums":
        sums.weighted_sums(t, tile, P)
    elif P.name == "factors" or P.name == "clipped_factors":
        sums.factors(t, tile, P)
    elif P.name == "lerp" or P.name == "square_lerp":
        elementwise.lerp(t, tile, P)
    elif P.name == "cached_norm":
        elementwise.cached_norm(t, tile, P)
    elif P.name == "fold":
        sums.fold(t, tile, P)
    else:
        elementwise.apply(t, tile, P)
