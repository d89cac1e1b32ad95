"""Compiles kernels for a GPU that need not be here: [[kernel, warps, constants], ...] on stdin.

A process of its own: kernels that were imported for Triton's interpreter cannot be compiled.
"""

import json
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_ext.ops.triton import kernels, tables

TYPES = {t.name: t for t in (tl.float32, tl.bfloat16, tl.float16, tl.int16, tl.int8)}
EIGHT = (kernels.IS_ADAM8_STEP.value, kernels.IS_SIGN8_STEP.value)
ARGUMENTS = {"table": "*i64", "count": "i32"}


def ptx(kernel: str, warps: int, constants: dict) -> str:
    """The kernel's code for sm_90."""
    function = getattr(kernels, kernel)
    values = {
        (function.arg_names.index(name),): TYPES.get(value, value)
        for name, value in constants.items()
    }
    signature = ARGUMENTS | dict.fromkeys(constants, "constexpr")
    source = ASTSource(function, {name: signature[name] for name in function.arg_names}, values)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=tables.options(warps)).asm["ptx"]


def main() -> int:
    """Writes what could not be compiled, and what has no vectors where runs are aligned."""
    faults = 0
    for kernel, warps, constants in json.load(sys.stdin):
        try:
            code = ptx(kernel, warps, constants)
        except Exception as error:
            print(kernel, constants, repr(error)[-2000:])
            faults += 1
            continue
        # what is written has the same bits everywhere: sums of squares may be divided roughly
        rough = (
            r"fma\.r" if not kernel.endswith("apply") else r"fma\.r|(?:div|sqrt)\.(?:full|approx)"
        )
        if re.search(rough, code):
            print(kernel, constants, "adds what it has not rounded, or divides roughly")
            faults += 1
        if constants.get("ALIGNED"):
            short = sorted(set(re.findall(r"(?:ld|st)\.global\.b16", code)))
            if kernel.startswith(("mark", "mend")) or constants.get("FORM") in EIGHT:
                short = []  # marks, what is left where they differ, scales of 8 bits
            if short or not re.search(r"ld\.global\.v4\.b32|cp\.async\.cg", code):
                print(kernel, constants, "has no vectors", short)
                faults += 1
    return faults > 0


if __name__ == "__main__":
    sys.exit(main())
