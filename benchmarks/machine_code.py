"""Counts the instructions of a kernel's machine code, compiled for an H100 that need not be here.

Counts are of the SASS, NVIDIA's machine code, as Triton's own cuobjdump prints it.
"""

import functools
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_ext.ops.executors.triton import kernels, launches
from ds_ext.ops.executors.triton.launches import KernelConstants
from ds_ext.ops.schema import ARGUMENTS

# Instructions by the unit of a multiprocessor that makes them, which has so many lanes on an H100.
# "alu" is the half-rate pipe of integers, logic, comparisons, selections and packing conversions.
# "imad", on half of the lanes for fp32, counts a product of 64 bits twice. Others are "fp32" if
# they begin with F or HF, else "rest": branches, barriers, loads, stores, shuffles.
ALU = set(
    "IADD3 IADD LOP3 PLOP3 SHF LEA ISETP FSETP FSEL SEL FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 PRMT "
    "IABS F2FP I2FP F2IP VABSDIFF MOV SGXT BMSK FCHK CS2R P2R R2P".split()
)
SLOW = {"MUFU", "I2F", "F2I", "F2F", "I2I", "FRND", "POPC", "FLO", "BREV"}
FP32 = {"FADD", "FMUL", "FFMA", "FSWZADD", "HFMA2", "HADD2", "HMUL2"}
LANES = {"all": 128, "alu": 64, "imad": 64, "slow": 16}
LOADS, STORES = ("LDG", "LDGSTS"), ("STG",)
WIDE = ("128", "64")  # bits of an access that count as a vector
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


@dataclass
class Counts:
    """Instructions of a kernel: all, and by unit; of its hot path and of its first loop."""

    registers: int = 0
    spilled: int = 0
    calls: int = 0
    size: int = 0
    hot: Counter[str] = field(default_factory=Counter)
    loop: Counter[str] = field(default_factory=Counter)

    def of_element(self, elements: float) -> Counter[str]:
        """Returns instructions of an element: ``elements`` are those of a thread or iteration."""
        found = self.loop or self.hot
        return Counter({key: n / elements for key, n in found.items()})


@functools.cache
def counted(kind: KernelConstants, warps: int) -> Counts:
    """Returns the counts of a launch."""
    return counts_of(compiled(launches.constants(kind, 16), warps).asm["cubin"])


def compiled(constants: Mapping[str, Any], warps: int) -> Any:
    """Returns a launch's kernel for sm_90, as Triton compiles it."""
    function = kernels.run
    values = {(function.arg_names.index(name),): x for name, x in constants.items()}
    kinds = ["i64"] * ARGUMENTS + ["constexpr"] * len(constants)
    source = ASTSource(function, dict(zip(function.arg_names, kinds, strict=True)), values)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=launches.options(warps))


def counts_of(cubin: bytes) -> Counts:
    """Returns the counts of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), name, rest) for at, name, rest in LINE.findall(text)]
    starts, found = _blocks(lines), Counts()
    registers = re.search(r"REG:(\d+)", text)
    assert registers is not None and lines
    found.registers, found.size = int(registers[1]), len(lines)
    bodies = [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    called = {int(_target(rest), 16) for _, name, rest in lines if name.startswith("CALL")}
    end = min(called, default=math.inf)  # subroutines come last
    hot = []
    for body in bodies:
        has_call = any(name.startswith("CALL") for _, name, _ in body)
        found.calls += has_call
        if not has_call and body[0][0] < end:
            hot += body
    found.spilled = sum(name.startswith(("STL", "LDL")) for _, name, _ in lines)
    found.hot = _units(hot)
    if (loop := _first_loop(lines, hot)) is not None:
        found.loop = _units([one for one in hot if loop[0] <= one[0] <= loop[1]])
    return found


def _blocks(lines: Sequence[tuple[int, str, str]]) -> list[int]:
    """The indices at which basic blocks begin."""
    at = {address: i for i, (address, *_) in enumerate(lines)}
    starts = {0}
    for i, (_, name, rest) in enumerate(lines):
        if name.startswith(("BRA", "EXIT", "RET")):
            starts.add(i + 1)
            if name.startswith("BRA"):
                starts.add(at[int(_target(rest), 16)])
        if name.startswith("CALL"):
            starts.add(at[int(_target(rest), 16)])
    return sorted(starts - {len(lines)})


def _target(rest: str) -> str:
    return rest.split()[-1].strip("`()")


def _first_loop(
    lines: Sequence[tuple[int, str, str]], hot: Sequence[tuple[int, str, str]]
) -> tuple[int, int] | None:
    """The addresses of the first loop that has no other in it and loads, or None."""
    ends = {}
    for address, name, rest in hot:
        if name.startswith("BRA") and (target := int(_target(rest), 16)) < address:
            ends[address] = target
    loops = sorted((start, end) for end, start in ends.items())
    for start, end in loops:
        is_inner = not any(start <= a and b < end for a, b in loops)
        body = [name for at, name, _ in lines if start <= at <= end]
        if is_inner and any(name.startswith(("LDG", "LDS")) for name in body):
            return start, end
    return None


def _units(lines: Sequence[tuple[int, str, str]]) -> Counter[str]:
    """Instructions by unit, and accesses of global memory."""
    found: Counter[str] = Counter()
    for _, name, _ in lines:
        kind = name.split(".")[0]
        if kind == "NOP":
            continue
        found["all"] += 1
        if kind in ALU:
            found["alu"] += 1
        elif kind in ("IMAD", "IMUL"):
            found["imad"] += 2 if ".WIDE" in name or ".HI" in name else 1
        elif kind in SLOW:
            found["slow"] += 1
        elif kind in FP32:
            found["fp32"] += 1
        else:
            found["rest"] += 1
        if kind in (*LOADS, *STORES):
            is_vector = any(f".{bits}" in name for bits in WIDE)
            found["vector" if is_vector else "scalar"] += 1
    return found
