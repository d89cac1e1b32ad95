"""Cached norms of the updated weights, for native passes."""

import operator

import numpy as np

from ds_ext.ops import schema
from ds_ext.ops.runs import Pointers, Runs

VERSION = operator.attrgetter("_version")


class NormCache:
    """The sums of squares of the weights that the last step wrote.

    An entry is valid while its run has the same address and version counter. Writes through
    ``param.data`` do not change the counter; ``schema.PROBES`` sampled weights detect them.
    """

    def __init__(self, n: int) -> None:
        self._values = np.full((n, 1 + schema.PROBES), -1, dtype=np.float32)
        self._where: Pointers | None = None
        self._versions: list[int] = []
        step = self._values.strides[0]
        self.pointers: Pointers = self._values.ctypes.data + step * np.arange(n)

    def check(self, runs: Runs) -> None:
        """Invalidates entries of runs written since ``note``; all entries if a run has moved."""
        versions = [*map(VERSION, runs.tensors)]
        if self._where is None or not np.array_equal(self._where, runs.pointers):
            self._values[:, 0] = -1
        elif versions != self._versions:
            for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)):
                if now != then:
                    self._values[i, 0] = -1

    def forget(self) -> None:
        """Invalidates the cache."""
        self._where = None

    def note(self, runs: Runs) -> None:
        """Records the runs' addresses and version counters, which must include the last writes."""
        self._where, self._versions = runs.pointers, [*map(VERSION, runs.tensors)]

    def clear(self) -> None:
        """Drops the sums, because another executor has written the weights."""
        self._values[:, 0] = -1
