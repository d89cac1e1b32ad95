"""8-bit storage of bf16 weights: int8 codes, and a scale for each 256 consecutive elements.

A scale is the smallest power of two at which the codes of its group fit into [-127, 127]. bf16
holds every code times its scale exactly. A weight that no step has changed therefore keeps its
value, and encoding a decoded weight again changes nothing. New weights are rounded stochastically,
by random bits that depend on key and element alone (``rounding``), so that all ranks store the same
codes.

The storage of a parameter's values is freed while nobody uses them. Views that autograd has saved
share this storage. Between uses the parameter itself is a NaN of its shape without memory: a read
shows NaN, and a write raises an error.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ds_ext.ops.rounding import add_noise_

SIZE = 256  # elements that share a scale
BLOCK, GPU_BLOCK = 2**18, 2**22  # elements that are encoded at a time
MIN_NUMEL = 2**16  # smaller weights stay in bf16


class Int8Weight:
    """The codes of a weight, and its bf16 values while they exist.

    Args:
        weight: a bf16 weight whose number of elements ``SIZE`` divides.
        device: of the codes and the values; None: the weight's.
        start: the position of its first element in the whole parameter, which ``SIZE`` divides.
        partition: this rank's part of the parameter, if ZeRO-3 has divided it: the tensor that has
            the values while they exist.

    Attributes:
        stored: the memory of codes and scales, which ranks send each other, [bytes] int8.
        codes: [numel] int8.
        scales: [numel / SIZE] bf16; NaN for a group with an element that is not finite.
        values: the weight, whose storage may be freed.
    """

    def __init__(
        self,
        weight: Tensor,
        device: torch.device | None = None,
        start: int = 0,
        partition: Tensor | None = None,
    ) -> None:
        self.start, self.partition = start, partition
        self.values = weight.detach().to(device or weight.device).contiguous().data
        storage, n = self.values.untyped_storage(), weight.numel()
        if not storage.resizable() or storage.nbytes() != self.values.nbytes:
            self.values = self.values.clone()  # of a mapped file, or a part of a larger tensor
        self.stored = self.values.new_empty(nbytes(n), dtype=torch.int8)
        self.codes, self.scales = self.stored[:n], self.stored[n:].view(self.values.dtype)
        nan = self.values.new_full((), torch.nan)
        self.absent = nan.expand(weight.shape)
        self.in_backward = False  # whether a node of a backward pass still needs the values
        self.is_loading = False  # whether ``load_state_dict`` is going to change the values
        self._copy: Callable[[], Tensor | None] = _none  # a copy that somebody still has
        self.encode()

    @property
    def is_freed(self) -> bool:
        """Whether the values do not exist."""
        return not self.values.untyped_storage().nbytes()

    def place(self, param: Tensor) -> Tensor:
        """Returns the tensor that has the values while they exist: ``param``, or its partition."""
        return param if self.partition is None else self.partition

    def encode(self, key: int | None = None) -> None:
        """Stores the values: rounded stochastically by ``key``, or to nearest without a key.

        Random bits have a resolution of 2**-16 codes. Only values below 2**-9 codes have a smaller
        fraction, because bf16 has 8 significant bits. It is cut off, 2**-17 codes on average.
        """
        self._copy = _none
        flat = self.values.view(-1)
        block = BLOCK if flat.device.type == "cpu" else GPU_BLOCK
        for start in range(0, len(flat), block):
            x = flat[start : start + block].float().view(-1, SIZE)
            scales = _scales(x)
            x.div_(scales.unsqueeze(1))
            if key is None:
                x.round_()
            else:
                bits = x.abs().mul_(2**16).to(torch.int32)
                add_noise_(bits.view(-1), key, self.start + start)
                x = bits.bitwise_right_shift_(16).to(x.dtype).copysign_(x)
            self.codes[start : start + block] = x.view(-1)
            self.scales[start // SIZE : (start + block) // SIZE] = scales

    def expand(self) -> None:
        """Computes the values if they do not exist."""
        if self.is_freed:
            self.values.untyped_storage().resize_(self.values.numel() * self.values.itemsize)
            decode(self.stored, self.values)

    def free(self) -> None:
        """Frees the values."""
        self.values.untyped_storage().resize_(0)

    def decoded(self) -> Tensor:
        """Returns a copy of the values in the host's memory.

        It returns the same tensor again while a caller still holds it, so that a state dict has one
        copy of tied weights.
        """
        values = self._copy()
        if values is None:
            values = torch.empty(self.values.shape, dtype=self.values.dtype, device="cpu")
            decode(self.stored.cpu(), values)
            self._copy = weakref.ref(values)
        return values


def _none() -> None:
    return None


def _scales(x: Tensor) -> Tensor:
    """The scales of groups, [n, SIZE] -> [n]: powers of two, at least bf16's smallest normal."""
    most = x.abs().amax(1)
    mantissa, exponent = torch.frexp(most)  # most = mantissa * 2**exponent, mantissa in [1/2, 1)
    exponent = (exponent - 7 + (mantissa > 127 / 128)).clamp_(min=-126)
    scales = torch.ldexp(torch.ones_like(most), exponent)
    return scales.masked_fill_(most.isfinite().logical_not_(), torch.nan)


def decode(stored: Tensor, values: Tensor) -> Tensor:
    """Overwrites ``values`` by codes times scales, [bytes] or [runs, bytes]; returns it."""
    n = values.numel() * stored.shape[-1] // stored.numel()
    codes = stored[..., :n].unflatten(-1, (-1, SIZE))
    scales = stored[..., n:].view(values.dtype).unsqueeze(-1)
    torch.mul(codes, scales, out=values.view(codes.shape))
    return values


_stored: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()  # parameter: its Int8Weight


def fits(shape: Sequence[int], runs: int = 1) -> bool:
    """Returns whether a weight of this shape is large enough, and equal runs have whole groups."""
    numel = math.prod(shape)
    return len(shape) >= 2 and numel >= MIN_NUMEL and numel % (SIZE * runs) == 0


def nbytes(numel: int) -> int:
    """Returns the bytes that store ``numel`` elements."""
    return numel + 2 * numel // SIZE


def find(param: Tensor) -> Int8Weight | None:
    """Returns the codes of a parameter; None if its weights are not stored in 8 bits."""
    found: Int8Weight | None = _stored.get(param) if _stored.data else None
    return found


def store(
    param: Tensor,
    device: torch.device | None = None,
    partition: Tensor | None = None,
    start: int = 0,
) -> None:
    """Replaces the values of a bf16 parameter by codes, on ``device``.

    If ZeRO-3 has divided the parameter, replaces this rank's ``partition``, which begins at
    ``start``.
    """
    weight = param if partition is None else partition
    _stored[param] = Int8Weight(weight, device, start, partition)
    release([param])


def restore(param: Tensor) -> None:
    """Gives a parameter its bf16 values back, and drops its codes."""
    expand([param])
    del _stored[param]


def expand(params: Iterable[Tensor]) -> list[Tensor]:
    """Gives parameters that are stored in 8 bits their bf16 values; returns these parameters."""
    found = []
    for param in params:
        if (held := find(param)) is not None:
            held.expand()
            held.place(param).data = held.values
            found.append(param)
    return found


def release(params: Iterable[Tensor], even_in_backward: bool = False) -> None:
    """Frees the values of parameters, except of those that a backward pass still needs."""
    for param in params:
        if (held := find(param)) is None or held.in_backward > even_in_backward:
            continue
        held.in_backward = False
        held.place(param).data = held.absent
        held.free()


@contextlib.contextmanager
def readable(params: Iterable[Tensor]) -> Iterator[None]:
    """A context in which parameters have their values, which must not be changed."""
    freed = [p for p in params if (held := find(p)) is not None and held.is_freed]
    expand(freed)
    try:
        yield
    finally:
        release(freed)


def write(param: Tensor, values: Tensor) -> None:
    """Stores new values, [numel], rounded to nearest."""
    for stored in expand([param]):
        _stored[stored].values.view(-1).copy_(values)
        update(stored)
    release([param])


def update(param: Tensor, key: int | None = None) -> None:
    """Stores the changed values of a parameter, as ``Int8Weight.encode``.

    Its version counter increases, because the values are rounded.
    """
    held = find(param)
    assert held is not None
    held.encode(key)
    torch.autograd.graph.increment_version(held.place(param))
