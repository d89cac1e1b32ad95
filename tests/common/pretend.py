"""A second device, pretended: memory of its own, and an error where an operation mixes the two.

Tensors on ``DEVICE`` are plain ones of the CPU whose storages are on a list; they say that they lie
there. DeepSpeed takes it for its accelerator. ``device()`` counts the bytes alive on it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ext.ops import normal, quantize, rounding
from tests.common.states import tensors

HOST = torch.device("cpu")
DEVICE = torch.device("cpu", 1)  # which no machine has
_device, _to = torch.Tensor.device, torch.Tensor.to


class Accelerator(CPU_Accelerator):
    """The device as DeepSpeed knows it, which notes how many bytes it was asked to pin."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned = 0

    def pin_memory(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.pinned += tensor.nbytes
        return tensor

    def device_name(self, device_index: int | None = None) -> str:
        return str(DEVICE)

    def current_device_name(self) -> str:
        return str(DEVICE)

    def is_fp16_supported(self) -> bool:
        return True


class Mixed(RuntimeError):
    """An operation on tensors of both devices."""


class Memory(TorchDispatchMode):
    """The storages that lie on ``DEVICE``."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.elders: dict[int, tuple[StorageWeakRef, int]] = {}  # from before ``begin``
        self.peak = 0
        self.bound = 0  # what is alive, and what may have died since it was last counted
        self.copied: dict[str, int] = {"in": 0, "out": 0}  # bytes
        self.counts = True
        self.accelerator = Accelerator()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # and does not import it, for seconds

    def holds(self, x: Tensor) -> bool:
        key = x.untyped_storage()._cdata
        found = self.storages.get(key) or self.elders.get(key)
        return found is not None and not found[0].expired()

    def put(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if not self.holds(x) and not self.counts:
            self.elders[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        elif not self.holds(x):
            self.elders.pop(storage._cdata, None)
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.bound += storage.nbytes()
            if self.bound > self.peak:
                self.bound = self.alive()
                self.peak = max(self.peak, self.bound)
        return x

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context whose new tensors on the device are not counted."""
        self.counts = False
        yield
        self.counts = True

    def begin(self) -> None:
        """Counts anew, what comes from now on."""
        self.elders |= self.storages
        self.storages, self.peak, self.bound = {}, 0, 0
        self.copied = {"in": 0, "out": 0}
        self.accelerator.pinned = 0

    def alive(self) -> int:
        """Bytes on the device, of what came since ``begin``."""
        dead = [key for key, (ref, _) in self.storages.items() if ref.expired()]
        for key in dead:
            del self.storages[key]
        return sum(size for _, size in self.storages.values())

    def move(self, x: Tensor, device: torch.device) -> Tensor:
        """A copy on another device."""
        return torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x)

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("device")
        if wanted is not None:
            kwargs["device"] = HOST
        given = list(tensors((args, kwargs)))
        inside = {self.holds(x) for x in given if x.dim() or self.holds(x)}
        name = f.overloadpacket.__name__
        if len(inside) > 1:
            if name != "copy_":
                raise Mixed(f"{f} of {[(tuple(x.shape), str(x.device)) for x in given]}")
            self.copied["in" if self.holds(args[0]) else "out"] += args[0].nbytes
        made = f(*args, **kwargs)
        if name == "copy_":
            return made
        # Autograd names the CPU where it means the tensor's own device; scripts call ``to``.
        if wanted == DEVICE or True in inside:
            for x in tensors(made):
                self.put(x)
        return made


@contextlib.contextmanager
def device() -> Iterator[Memory]:
    """The device exists within the context."""
    memory = Memory()

    def where(x: Tensor) -> torch.device:
        return DEVICE if memory.holds(x) else _device.__get__(x)

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            wanted, dtype = where(args[0]), args[0].dtype
        else:
            own = {k: v for k, v in kwargs.items() if k != "copy"}
            wanted, dtype, *_ = torch._C._nn._parse_to(*args, **own)
        copy = kwargs.get("copy", False)
        if wanted is not None and wanted != where(x):
            moved = memory.move(x.detach(), wanted)
            return moved if dtype is None else _to(moved, dtype)
        return _to(x, dtype or x.dtype, copy=copy)

    with (
        mock.patch.object(torch.Tensor, "device", property(where), create=True),
        mock.patch.object(torch.Tensor, "to", to),
        mock.patch.object(torch.Tensor, "cpu", lambda x: to(x, "cpu")),
        mock.patch.object(real_accelerator, "ds_accelerator", memory.accelerator),
        memory,
    ):
        _forget()
        yield memory
        _forget()


def _forget() -> None:
    """Drops what is kept for a device: the next one is another."""
    rounding.noise_table.cache_clear()
    rounding.shifted_noise.cache_clear()
    quantize._book.cache_clear()
    normal._quantiles.cache_clear()
