"""Faults of kernels that the execution of their compiled IR finds: races, accesses, bits."""

from tests.tools.faults.fault import Fault

KERNELS = "ops/executors/triton/kernels/"
IR = " -p tests.tools.ir"
BUCKET = "unit/test_kernels.py -k 'few_launches and came'" + IR
STEP = "unit/test_kernels.py -k 'test_a_step_is_that_of_the_ops and {}'" + IR
NOISE = "unit/test_kernels.py -k 'test_noise and {}'" + IR
MOMENTS = "unit/test_kernels.py -k test_moments" + IR
FAULTS = (
    # masks: another program's element, or memory that is nobody's
    Fault(
        KERNELS + "table_access.py",
        "ok = (e >= 0) & (e < n) & (k < left)[None, :]",
        "ok = (e >= 0) & (e < n) & (k >= 0)[None, :]",
        BUCKET,
    ),
    Fault(
        KERNELS + "table_access.py",
        "ok = (e >= 0) & (e < n) & (k < left)[None, :]",
        "ok = (e >= 0) & (e <= n) & (k < left)[None, :]",
        STEP.format("lomo-3"),
    ),
    Fault(
        KERNELS + "sums.py",
        "tl.store(col, tl.sum(square, axis=0), mask=j < cols)",
        "tl.store(col, tl.sum(square, axis=0))",
        BUCKET,
    ),
    Fault(
        KERNELS + "sums.py",
        "tl.store(pointer(t, OUT2, tl.float32) + at, _inverse_root(new, new), mask=has)",
        "tl.store(pointer(t, OUT2, tl.float32) + at, _inverse_root(new, new))",
        BUCKET,
    ),
    Fault(
        KERNELS + "weights.py",
        "tl.store(run_at(t, AUX, tl.int16, e, P), bits.to(tl.int16), mask=ok)",
        "tl.store(run_at(t, AUX, tl.int16, e, P), bits.to(tl.int16))",
        MOMENTS,
    ),
    # bits of the noise and of rounding
    Fault(
        KERNELS + "weights.py",
        "tl.where(tl.abs(x) <= MOST_BF16, bits + noise, bits)",
        "tl.where(tl.abs(x) <= MOST_BF16, bits - noise, bits)",
        NOISE.format("dtype0"),
    ),
    Fault(
        KERNELS + "weights.py",
        "tl.where(tl.abs(x) <= MOST_BF16, bits + noise, bits)",
        "tl.where(tl.abs(x) <= MOST_BF16, bits + noise + 1, bits)",
        NOISE.format("dtype0"),
    ),
    Fault(
        KERNELS + "weights.py",
        "(steps - whole) * 65536.0",
        "(steps - whole) * 32768.0",
        NOISE.format("dtype1"),
    ),
    Fault(
        KERNELS + "weights.py",
        "held = tl.where(_is_finite(new), _to_fp16(new, noise), new)",
        "held = _to_fp16(new, noise)",
        NOISE.format("dtype1"),
    ),
    # the compiled division, of which the interpreter sees nothing
    Fault(
        KERNELS + "values.py",
        "return tl.fma(tl.fma(-quotient, y, x), reciprocal, quotient)",
        "return quotient",
        MOMENTS,
    ),
)
