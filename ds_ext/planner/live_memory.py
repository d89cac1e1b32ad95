"""Counts the bytes of live tensors: each storage from its allocation until it is freed."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of live storages: the current number ``now``, and the peak ``most``.

    Counts the storages of ``kept``, and of the outputs of operators in the thread that entered the
    context. On the CPU this thread also runs backward. A shared storage counts once.
    """

    def __init__(self, kept: Iterable[Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # of live storages
        self.now = self.most = 0
        for tensor in kept:
            self._see(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, Tensor):
                self._see(value)
        return made

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            # The Python object of a storage lives as long as the storage itself.
            weakref.finalize(storage, self._gone, key).atexit = False
        self.now += storage.nbytes() - self.sizes.get(key, 0)  # resized, or new
        self.sizes[key] = storage.nbytes()
        self.most = max(self.most, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
