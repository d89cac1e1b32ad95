"""Compiles kernels for a GPU that need not be here: [[label, warps, constants], ...] on stdin.

A process of its own: kernels that were imported for Triton's interpreter cannot be compiled.
"""

import importlib
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.machine_code import compiled
from ds_ext.ops.executors.triton import kernels
from ds_ext.ops.executors.triton.launches import KernelConstants

EIGHT = [kernels.FORM[name].value for name in ("IS_ADAM8_STEP", "IS_SIGN8_STEP")]
DIVIDES = {"factors", "clipped_factors", "weighted_sums"}


def faults(asm: Mapping[str, str], one: KernelConstants) -> list[str]:
    """What is wrong with code: what it has not rounded, and reads without vectors."""
    code = asm["ptx"]
    asked = re.findall(r"call .*@llvm\.fma\.(?:v(\d+))?f32", asm["llir"])  # by the kernels' text
    found = []
    # what is written has the same bits everywhere: sums of squares may be divided roughly
    if one.name not in DIVIDES and (
        len(re.findall(r"fma\.r", code)) != sum(int(n or 1) for n in asked)
        or re.search(r"(?:div|\bsqrt)\.(?:full|approx)", code)
    ):
        found.append("adds what it has not rounded, or divides roughly")
    if one.fields.get("ALIGNED"):
        short = sorted(re.findall(r"(?:ld|st)\.global\.b16", code))
        vector = "v4"
        if one.name == "cached_norm":  # with many warps: vectors of 8 bytes, and probes
            vector, short = "v[24]", []
        if one.name == "apply_and_cache_norm" and "ld.global.b16" in short:
            short.remove("ld.global.b16")  # its one probe
        if one.fields.get("FORM") in EIGHT:
            short = []  # scales of 8 bits
        if short or not re.search(rf"ld\.global\.{vector}\.b32|cp\.async\.cg", code):
            found.append(f"has no vectors {short}")
    return found


def main() -> int:
    """Writes what could not be compiled, and what has no vectors where runs are aligned."""
    count = 0
    for label, warps, written in json.load(sys.stdin):
        constants = {name: given(x) for name, x in written.items()}
        try:
            asm = compiled(constants, warps).asm
        except Exception as error:
            print(label, written, repr(error)[-2000:])
            count += 1
            continue
        for fault in faults(asm, constants["P"]):
            print(label, written, fault)
            count += 1
    return count > 0


def plain(value: Any) -> Any:
    """Returns a constant in plain types: a dtype by its name."""
    if isinstance(value, KernelConstants):
        return {name: plain(x) for name, x in value.fields.items()}
    return getattr(value, "name", value)


def given(value: Any) -> Any:
    """Returns the inverse of ``plain``."""
    if isinstance(value, dict):
        return KernelConstants(**{name: given(x) for name, x in value.items()})
    tl = importlib.import_module("triton.language")
    types = {t.name: t for t in (tl.float32, tl.bfloat16, tl.float16, tl.int16, tl.int8)}
    return types.get(value, value)


if __name__ == "__main__":
    sys.exit(main())
