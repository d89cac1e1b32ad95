"""Launches, and their tables: one copy to the device brings the tables of all merged launches."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_ext.ops.executors.triton.columns import AT, COLUMNS
from ds_ext.ops.executors.triton.tiles import Int64s, Tiles

Constants: TypeAlias = tuple[tuple[str, Any], ...]
HostNumber: TypeAlias = float | NDArray[np.float32]  # one for all parameters, or one for each
# Passes in which an element depends on no other element that an earlier pass has written.
BY_ELEMENT = {"square_sums", "row_col_sums", "lerp", "square_lerp"}
BY_ELEMENT |= {"apply", "noting_apply", "measured_apply"}


@dataclass(frozen=True, eq=False)
class Template:
    """The properties of a launch that are the same in all steps; compared by identity."""

    kernel: str
    constants: Constants
    tiles: Tiles
    own: Int64s | None  # the indices of its parameters in ``tiles``; None: all
    columns: Sequence[int]  # the columns of ``Launch.addresses``
    numbers: Sequence[tuple[int, bool]]  # columns of ``Launch.numbers``; whether they are [n]

    @functools.cached_property
    def rows(self) -> Int64s:
        """The geometry of its parameters, [n, columns]."""
        return self.tiles.rows if self.own is None else self.tiles.rows[self.own]

    @functools.cached_property
    def programs(self) -> Int64s:
        """The programs of each parameter, [n]."""
        return self.tiles.programs if self.own is None else self.tiles.programs[self.own]

    def is_over(self, other: "Template") -> bool:
        """Whether each program of both has the same elements, and reads no other program's."""
        if not {self.kernel, other.kernel} <= BY_ELEMENT or self.tiles is not other.tiles:
            return False
        if self.own is None or other.own is None:
            return self.own is other.own
        return np.array_equal(self.own, other.own)


class Launch(NamedTuple):
    """One pass over some parameters of a table, in one step."""

    template: Template
    addresses: Sequence[Int64s]  # of each column, [n]
    numbers: Sequence[HostNumber]  # the table has the address of each as a column
    alive: Sequence[object]  # tensors at ``addresses``, which must not be freed before the launch

    def cut(self, own: Int64s | None, template: Template | None = None) -> "Launch":
        """Returns the launch over the parameters ``own``; None: over all."""
        if own is None:
            return self
        numbers = [x if isinstance(x, float) else x[own] for x in self.numbers]
        addresses = [x[own] for x in self.addresses]
        return Launch(template or self.template, addresses, numbers, self.alive)


class Part(NamedTuple):
    """The parameters [start, stop) of a launch."""

    template: Template
    launch: int  # index of the launch in its queue
    start: int
    stop: int

    @property
    def rows(self) -> Int64s:
        """The geometry of its parameters, [n, columns]."""
        return self.template.rows[self.start : self.stop]

    @property
    def programs(self) -> Int64s:
        """The programs of each parameter, [n]."""
        return self.template.programs[self.start : self.stop]


# Passes over the same elements; each program makes them one after another.
Chain: TypeAlias = Sequence[Part]


@dataclass(frozen=True, eq=False)
class MergedLaunch:
    """Several chains merged into one launch, whose parameters have different kinds of passes."""

    chains: list[Chain]
    kinds: tuple[Any, ...]
    of_each: list[int]  # the kind of each chain
    warps: int
    label: str  # the passes of each kind
    count: int  # parameters
    passes: int  # table rows of each parameter
    named: Mapping[str, Any]  # the constants of the kernel

    @functools.cached_property
    def ends(self) -> Int64s:
        """The number of programs up to each parameter, and its own, [count]."""
        return np.cumsum(np.concatenate([chain[0].programs for chain in self.chains]))

    @functools.cached_property
    def programs(self) -> int:
        """The number of programs."""
        return int(self.ends[-1])

    @property
    def table_words(self) -> int:
        """The size of the table in 8-byte words."""
        return self.count * self.passes * len(COLUMNS)

    @property
    def words(self) -> int:
        """The size of the table and its numbers in 8-byte words, rounded up to 16 bytes."""
        parts = [part for chain in self.chains for part in chain]
        floats = sum(_size(part.template, len(part.rows)) for part in parts)
        words = self.table_words + -(-floats // 2)
        return words + words % 2


class LaunchTables:
    """The tables of merged launches that are copied together.

    They do not depend on the step, except for the addresses and numbers that ``fill`` writes.

    Args:
        joints: the merged launches.
        templates: of the launches that were merged.

    Attributes:
        words: the size of all tables in 8-byte words.
        starts: the position of the table of each merged launch, words.
    """

    def __init__(self, joints: Sequence[MergedLaunch], templates: Sequence[Template]) -> None:
        self.joints = joints
        sizes = [joint.words for joint in joints]
        self.words, self.starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
        self._words = np.zeros(self.words, dtype=np.int64)
        counts = [_size(x, len(x.rows)) for x in templates]
        self._firsts = np.cumsum([0, *counts])  # the index of the first number of each launch
        # Positions of the addresses of each launch, [columns, n].
        self._at = [np.zeros((len(x.columns), len(x.rows)), dtype=np.int64) for x in templates]
        # For each number: its position among floats, its index in ``_firsts``. For each address of
        # a number: its position, and the bytes between the first table and the number.
        self._placed: list[list[Int64s]] = [[np.zeros(0, dtype=np.int64)] for _ in range(4)]
        for joint, start in zip(joints, self.starts, strict=True):
            self._lay_out(joint, start)
        self._addresses_at = np.concatenate([at.ravel() for at in self._at])
        self._numbers_at, self._numbers, self._columns_at, self._offsets = map(
            np.concatenate, self._placed
        )

    def _lay_out(self, joint: MergedLaunch, start: int) -> None:
        """Writes the geometry of a merged launch; notes where its addresses and numbers belong."""
        shape, end = (joint.count, joint.passes, len(COLUMNS)), start + joint.table_words
        table, places = (x[start:end].reshape(shape) for x in (self._words, np.arange(end)))
        row, number_at = 0, 2 * end
        for chain, kind in zip(joint.chains, joint.of_each, strict=True):
            n = len(chain[0].rows)
            for i, part in enumerate(chain):
                at = places[row : row + n, i]
                table[row : row + n, i] = part.rows
                self._at[part.launch][:, part.start : part.stop] = at[:, part.template.columns].T
                number = self._firsts[part.launch]
                for column, is_of_each in part.template.numbers:
                    own = np.arange(part.start, part.stop) if is_of_each else np.zeros(1, int)
                    floats = number_at + np.arange(len(own))
                    found = floats, number + own, at[:, column], 4 * floats + np.zeros(n, int)
                    for placed, some in zip(self._placed, found, strict=True):
                        placed.append(some)
                    number_at += len(own)
                    number += len(part.template.rows) if is_of_each else 1
            table[row : row + n, 0, AT["kind"]] = kind
            row += n
        table[1:, 0, AT["program"]] = joint.ends[:-1]

    def fill(self, words: Int64s, address: int, given: Sequence[Launch]) -> None:
        """Writes the tables of a step.

        Args:
            words: where to write them, [words].
            address: of the memory on the device that they will be copied to.
            given: the launches that were merged, in the order of ``templates``.
        """
        words[:] = self._words
        words[self._addresses_at] = np.concatenate([x for one in given for x in one.addresses])
        words[self._columns_at] = self._offsets + address
        numbers: list[float] = []
        for one in given:
            for x in one.numbers:
                if isinstance(x, float):
                    numbers.append(x)
                else:
                    numbers += x.tolist()
        words.view(np.float32)[self._numbers_at] = np.array(numbers, np.float32)[self._numbers]


def _size(template: Template, n: int) -> int:
    """The host numbers that ``n`` parameters of a launch have."""
    return sum(n if is_of_each else 1 for _, is_of_each in template.numbers)
