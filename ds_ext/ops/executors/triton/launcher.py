"""Launches of kernels over many parameters: their tiles, arguments and sums."""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_ext.ops.executors.triton import launches, tiles
from ds_ext.ops.executors.triton.launch_memory import DeviceArrays, Memory
from ds_ext.ops.executors.triton.launches import KernelConstants, Launch
from ds_ext.ops.executors.triton.tiles import Constants, Geometry, Int64s, PartialSums, Tiles
from ds_ext.ops.runs import Columns, Runs
from ds_ext.ops.schema import ADDRESSES, ARGUMENT, ARGUMENTS, AT, NUMBERS

# Columns whose addresses must be aligned for vector access: runs only, or also ``out``.
VECTORS, OUT = (frozenset(ADDRESSES[: ADDRESSES.index(last) + 1]) for last in ("aux", "out"))
LEAST_ADDRESS = 2**32  # a number's argument is an address from here on, else the number's bits
TILES: dict[str, Callable[[Geometry], Tiles]] = {
    "flat": tiles.flat,  # of passes that ignore rows and columns
    "by_matrix": tiles.by_matrix,  # of passes that use them
    "for_sums": functools.partial(tiles.by_matrix, height=tiles.SUMS_TR, width=tiles.SUMS_TC),
    "by_strip": tiles.by_strip,  # as wide as the rows
    "by_parameter": tiles.by_parameter,  # one for each
    "rows": tiles.of_rows,  # a sum over all rows
}
KindOfSums: TypeAlias = Callable[[Geometry, Tiles], PartialSums]
MAX_LAUNCHES = 256  # kept by one object; more are needed only if each step runs other passes
MAX_PARAMETERS = 1024  # per launch: each program searches them for its own


class Launcher:
    """Launches kernels over many parameters on a GPU.

    Launches run in the order of the stream, so torch may read their results at once.

    Args:
        geometries: start, elements, matrices, rows and columns of each run.
        firsts: the index of each run's first element in its parameter.
        device: the device of the runs.
        arrays: the batch's part of a bucket's step; None: passes are not part of such a step.
    """

    def __init__(
        self,
        geometries: Sequence[tuple[int, int, int, int, int]],
        firsts: Sequence[int],
        device: torch.device,
        arrays: DeviceArrays | None = None,
    ) -> None:
        self.device, self.n, self.arrays = device, len(geometries), arrays or DeviceArrays()
        self.own = np.arange(self.n)
        start, n, mats, rows, cols = np.array(geometries, dtype=np.int64).T
        first = np.array(firsts, dtype=np.int64)
        self.geometry = Geometry(start, n, mats, rows, cols, first)
        self._tiles: dict[Hashable, Tiles] = {}
        self._partials: dict[tuple[str, KindOfSums], PartialSums] = {}
        self._launches: dict[Hashable, list[Launch]] = {}

    def launch(
        self,
        kernel: str,
        constants: Constants,
        name: Hashable,
        columns: Columns,
        vectors: frozenset[str] = VECTORS,
    ) -> None:
        """Runs a pass: a launch for each kind of tiles.

        Args:
            kernel: the name of the pass.
            constants: of the kernel.
            name: of the tiles.
            columns: objects with ``base`` and ``offsets`` for addresses; for numbers floats, arrays
                [n], or tensors of one number or n.
            vectors: the columns that are accessed by vectors.
        """
        columns = {**self.arrays.limits, **columns}
        at, arguments = self.tiles(name), [0] * ARGUMENTS
        contents, where, alive = list[bytes](), list[int](), list[Tensor]()
        ends: Int64s | int = 0  # the low bits of all addresses that are accessed by vectors
        for column, value in columns.items():
            i = ARGUMENT[column]
            if i >= ARGUMENT[NUMBERS[0]]:
                if isinstance(value, Tensor):
                    value = value.to(self.device, torch.float32)
                    value = value if value.numel() == len(at.rows) else value.expand(len(at.rows))
                    alive.append(value.contiguous())  # [n], a number for each parameter
                    arguments[i] = alive[-1].data_ptr()
                    assert not 0 < arguments[i] < LEAST_ADDRESS  # 0 on meta
                elif isinstance(value, np.ndarray):
                    contents.append(value.tobytes() + bytes(value.nbytes % 8))  # whole words
                    where.append(i)
                else:
                    arguments[i] = _bits(float(value))
                continue
            arguments[i], offsets = value.base, value.offsets
            contents.append(offsets.tobytes())
            where.append(i + 1)
            if at.aligned is not None and column in vectors:
                ends = ends | offsets | value.base
        are_even = None
        if not isinstance(ends, int) and np.bitwise_or.reduce(ends) % tiles.ALIGNMENT:
            are_even = ends % tiles.ALIGNMENT == 0
        found = self._launches_of(kernel, constants, name, are_even)
        contents += [one.contents for one in found]
        arrays = self.arrays  # those of one pass live until its launches are in the stream
        if arrays.memory is None:
            arrays = DeviceArrays(Memory(self.device))
        addresses = iter(arrays.addresses(contents))
        for i in where:
            arguments[i] = next(addresses)
        for one in found:
            arguments[:2] = next(addresses), len(one.rows)
            launches.launch_kernel(one, arguments, self.device)

    def _launches_of(
        self, kernel: str, constants: Constants, name: Hashable, are_even: NDArray[np.bool_] | None
    ) -> list[Launch]:
        """The launches of a pass, kept from step to step.

        A parameter's bits must not depend on its neighbours. Its kind of tiles therefore follows
        from its own run, and each kind has its own launches.
        """
        skips_bad = bool(self.arrays.limits)
        even = None if are_even is None else are_even.tobytes()
        key = kernel, constants, name, even, skips_bad
        if key in self._launches:
            return self._launches[key]
        at = self.tiles(name)
        if kernel == "cached_norm":  # one program visits all tiles of a parameter
            at = replace(at, programs=np.ones_like(at.programs))
        constants = (*constants, ("SKIPS_BAD_GRADIENTS", skips_bad))
        found = list[Launch]()
        for kind, members in at.kinds(are_even):
            found += _launches(at, members, *launches.compiled_pass(kernel, (*constants, *kind)))
        if len(self._launches) >= MAX_LAUNCHES:
            self._launches.clear()
        self._launches[key] = found
        return found

    def fold(self, *sums: tuple[PartialSums, Runs, Runs]) -> None:
        """Reduces partial sums in one launch: their description, memory, and the output of each.

        Tensors of one step lie at the same distances in each, so their offsets are as in the step
        before.
        """
        name = tuple([id(one) for one, *_ in sums])
        if name not in self._tiles:
            self._tiles[name] = tiles.joined([one.tiles for one, *_ in sums])
        part, out = sums[0][1].base, sums[0][2].base
        parts = [one.parts + (x.base - part) for one, x, _ in sums]
        outs = [x.offsets[one.owners] + one.outs + (x.base - out) for one, _, x in sums]
        columns: Columns = {
            "part": Runs.at(part, np.concatenate(parts)),
            "out": Runs.at(out, np.concatenate(outs)),
        }
        if limits := self.arrays.limits:
            found, owners = limits["found"], np.concatenate([one.owners for one, *_ in sums])
            columns["found"] = Runs.at(found.base, found.offsets[owners])
            columns["most"] = limits["most"][owners]
        self.launch("fold", (), name, columns)

    def added_up(self, rows: Runs) -> Tensor:
        """Returns the sum over all rows of each parameter, [n]."""
        (total,) = self.zeros(self.n)
        columns: Columns = {"part": rows, "out": Runs((total,), firsts=self.own)}
        self.launch("fold", (), "rows", columns)
        return total

    def scratch(self, n: int) -> Tensor:
        """Returns uninitialized memory, [n] in fp32."""
        return (self.arrays.memory or Memory(self.device)).scratch(n)

    def zeros(self, *sizes: int) -> Sequence[Tensor]:
        """Returns zeros to add sums to, [n] in fp32 for each size."""
        memory = self.arrays.memory or Memory(self.device)
        return memory.sums(sum(sizes)).split_with_sizes(sizes)

    def tiles(self, name: Hashable) -> Tiles:
        """Returns the tiles of a name in ``TILES``, or of a fold."""
        if name not in self._tiles:
            self._tiles[name] = TILES[str(name)](self.geometry)
        return self._tiles[name]

    def partials(self, name: str, kind: KindOfSums) -> PartialSums:
        """Returns the partial sums of tiles: their places, and how to reduce them."""
        if (name, kind) not in self._partials:
            self._partials[name, kind] = kind(self.geometry, self.tiles(name))
        return self._partials[name, kind]

    def allocate(self, sums: PartialSums) -> Runs:
        """Returns memory for the tiles' partial sums."""
        return Runs((self.scratch(sums.total),), firsts=sums.firsts)


def _launches(at: Tiles, members: Int64s, kind: KernelConstants, warps: int) -> Iterator[Launch]:
    """Launches over parameters of one kind, at most ``MAX_PARAMETERS`` each."""
    for some in np.split(members, range(MAX_PARAMETERS, len(members), MAX_PARAMETERS)):
        rows, programs = at.rows[some], at.programs[some]
        rows[:, AT["index"]] = some
        rows[:, AT["program"]] = np.cumsum(programs) - programs
        if programs.any():
            yield Launch(kind, rows, int(programs.sum()), warps)


@functools.lru_cache(4096)
def _bits(number: float) -> int:
    """The bits of a number in fp32, as a signed integer: no address is so small."""
    return int(np.float32(number).view(np.int32))
