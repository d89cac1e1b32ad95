"""Cached norms of the updated weights, for native passes."""

from typing import Any

import numpy as np

from ds_ext.ops import schema
from ds_ext.ops.batch import Pointers


class NormCache:
    """The sums of squares of weights as they were last written, which need not be read for them.

    They hold for runs at the same address whose version counters have not changed. Writes through
    ``param.data``, which do not count, are detected by ``schema.PROBES`` sampled weights.
    """

    def __init__(self, n: int) -> None:
        self._values = np.full((n, 1 + schema.PROBES), -1, dtype=np.float32)
        self._where: Pointers | None = None
        self._versions: list[int] = []
        step = self._values.strides[0]
        self.pointers: Pointers = self._values.ctypes.data + step * np.arange(n)

    def check(self, runs: Any) -> None:
        """Forgets those of runs that were written to since ``note``."""
        versions = [x._version for x in runs.tensors]
        if self._where is None or not np.array_equal(self._where, runs.pointers):
            self._values[:, 0] = -1
        elif versions != self._versions:
            for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)):
                if now != then:
                    self._values[i, 0] = -1

    def forget(self) -> None:
        """Takes the next step to know nothing."""
        self._where = None

    def note(self, runs: Any) -> None:
        """Takes the runs to be as a pass has left them, after torch was told of all writes."""
        self._where, self._versions = runs.pointers, [x._version for x in runs.tensors]

    def clear(self) -> None:
        """Drops the sums: the weights were written by another executor."""
        self._values[:, 0] = -1
