"""Cached norms of the updated weights; those of native passes."""

import operator

import numpy as np

from ds_ext.ops import schema
from ds_ext.ops.runs import Pointers, Runs

VERSION = operator.attrgetter("_version")


class NormCache:
    """The sums of squares of the weights that the last step wrote.

    They are valid while the runs have the same addresses and version counters. Writes through
    ``param.data`` do not change the counters; sampled weights detect them.

    Attributes:
        are_valid: whether the runs are as they were noted.
    """

    def __init__(self) -> None:
        self.are_valid = False
        self._where: bytes | None = None
        self._versions: list[int] = []

    def check(self, runs: Runs) -> None:
        """Invalidates the cache if a run has moved or was written since ``note``."""
        versions = [*map(VERSION, runs.tensors)]
        self.are_valid = versions == self._versions and runs.pointers.tobytes() == self._where

    def forget(self) -> None:
        """Invalidates the cache."""
        self._where = None

    def note(self, runs: Runs) -> None:
        """Records the runs' addresses and version counters, which must include the last writes."""
        self._where = runs.pointers.tobytes()
        self._versions = [*map(VERSION, runs.tensors)]


class NativeNormCache(NormCache):
    """One sum for each of ``n`` parameters, and ``schema.PROBES`` of its weights."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._values = np.full((n, 1 + schema.PROBES), -1, dtype=np.float32)
        self.pointers: Pointers = self._values.ctypes.data + self._values.strides[0] * np.arange(n)

    def check(self, runs: Runs) -> None:
        """Invalidates the cache if a run has moved or was written since ``note``."""
        super().check(runs)
        if not self.are_valid:
            self._values[:, 0] = -1
