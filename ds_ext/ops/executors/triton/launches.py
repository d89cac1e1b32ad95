"""Launches of the kernel, their constants, and compiled kernels."""

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_ext.ops import rounding, schema
from ds_ext.ops.executors.triton import tiles
from ds_ext.ops.executors.triton.tiles import Constants, Int64s, Named


class KernelConstants:
    """A kernel constant with named fields, which may be ``KernelConstants`` themselves.

    Triton identifies constants by ``repr``, from which it also derives names. Nested tuples would
    not do, because some versions of Triton do not support them.
    """

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        text = ", ".join(f"{name}={value!r}" for name, value in sorted(fields.items()))
        text += schema.LAYOUT  # of which Triton's key of a compiled kernel knows nothing
        self._name = "of_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        vars(self).update(fields)

    def __repr__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelConstants) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch of a pass over parameters of a batch with equal tiles: what all steps share.

    Attributes:
        kind: the constants of the pass for the tiles of these parameters.
        rows: the tiles of the launch's parameters, [count, columns].
        programs: their number.
        warps: of each program.
    """

    kind: KernelConstants
    rows: Int64s
    programs: int
    warps: int

    @functools.cached_property
    def contents(self) -> bytes:
        """The array ``rows``."""
        return self.rows.tobytes()


def launch_kernel(launch: Launch, arguments: Sequence[int], device: torch.device) -> None:
    """Launches the kernel on a GPU, which need not be the current one.

    Caches compiled kernels, because Triton's own lookup takes most of the time of a launch.
    ``arguments`` are those that are no constants.
    """
    count = padded(len(launch.rows))
    key = launch.kind, count, launch.warps, device
    with current(device):
        if key in _compiled:
            handle, values = _compiled[key]
            handle[launch.programs, 1, 1](*arguments, *values)
            return
        function, named = _kernels().run, constants(launch.kind, count)
        handle = function[(launch.programs,)](*arguments, **named, **options(launch.warps))
        if handle is not None:  # the interpreter returns None
            values = [named[name] for name in function.arg_names[len(arguments) :]]
            _compiled[key] = handle, values


# Compiled kernels, and their constants in the order of the arguments.
_compiled: dict[tuple[object, ...], tuple[Any, Sequence[object]]] = {}


def encode_int8(
    values: Tensor, codes: Tensor, exponents: Tensor, start: int, key: int | None
) -> None:
    """Launches ``Int8Weight.encode`` of contiguous bf16 values."""
    n, size = len(exponents), len(codes) // len(exponents)
    noise = rounding.noise_table(values.device)
    grid = (-(-n // tiles.ENCODED_GROUPS),)
    constants = {"IS_RANDOM": key is not None, "SIZE": size, "GROUPS": tiles.ENCODED_GROUPS}
    constants["num_warps"] = tiles.ENCODE_WARPS
    with current(values.device):
        _kernels().encode[grid](values, codes, exponents, noise, n, start, key or 0, **constants)


def decode_int8(stored: Tensor, values: Tensor, size: int) -> Tensor:
    """Launches ``int8.decode`` of contiguous runs, [runs, bytes], whose groups have ``size``."""
    runs, length = stored.shape
    groups = values.numel() // (runs * size)
    grid = (-(-groups // tiles.DECODED_GROUPS), runs)
    constants = {"SIZE": size, "GROUPS": tiles.DECODED_GROUPS}
    with current(values.device):
        _kernels().decode[grid](stored, values.view(-1), groups, length, **constants)
    return values


def options(warps: int) -> Named:
    """Triton's compile options: no fused multiply-add, as elsewhere.

    Triton's default for it differs between versions.
    """
    return {"num_warps": warps, "enable_fp_fusion": False}


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current device, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else _NULL


_NULL = contextlib.nullcontext()


def padded(count: int) -> int:
    """The number of rows that a program searches for its own: a power of two."""
    return max(16, 1 << (count - 1).bit_length())


def constants(kind: KernelConstants, count: int) -> Named:
    """The constants of a launch over ``count`` parameters, padded."""
    return {"COUNT": count, "P": kind}


@functools.cache
def compiled_pass(kernel: str, given: Constants) -> tuple[KernelConstants, int]:
    """A pass over parameters of one kind -> its constants, its number of warps."""
    named, kernels = dict(given), _kernels()
    shape, warps = tiles.shape_of(kernel, named)
    for name, numbers in (("FORM", kernels.FORM), ("STORAGE", kernels.FORMATS)):
        if name in named:
            named[name] = numbers[named[name]].value
    for name in named.keys() & {"XD", "WD"}:
        named[name] = getattr(kernels.tl, named[name])
    return KernelConstants(name=kernel, **(named | shape)), warps


def _kernels() -> ModuleType:
    """The kernels, imported at their first use because they import Triton."""
    from ds_ext.ops.executors.triton import kernels

    return kernels
