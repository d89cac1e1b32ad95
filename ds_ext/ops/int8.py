"""8-bit storage of bf16 weights: int8 codes, and a scale for each 32 consecutive elements.

A scale is the smallest power of two at which the codes of its group fit into [-127, 127]; a byte
has its exponent, as in the MXINT8 format of the Open Compute Project. bf16 holds every code times
its scale exactly. A weight that no step has changed therefore keeps its value, and encoding a
decoded weight again changes nothing. New weights are rounded stochastically, by random bits that
depend on key and element alone (``rounding``), so that all ranks store the same codes.

The codes own the weight. A parameter has bf16 values while somebody holds it (``expanded``). In
between it is a ``FreedParameter``: an operation that would read or write values raises an error.
"""

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ds_ext.ops.executors.triton import devices, launches
from ds_ext.ops.rounding import add_noise_

SIZE = 32  # elements that share a scale
BLOCK, GPU_BLOCK = 2**18, 2**22  # elements that are encoded at a time
MIN_NUMEL = 2**16  # smaller weights stay in bf16


class Int8Weight:
    """The codes of a weight.

    Args:
        weight: a bf16 weight whose number of elements ``SIZE`` divides.
        device: of the codes and the values; None: the weight's.
        start: the position of its first element in the whole parameter, which ``SIZE`` divides.
        partition: this rank's part of the parameter, if ZeRO-3 has divided it: the tensor that has
            the values while they exist.

    Attributes:
        stored: the memory of codes and scales, which ranks send each other, [bytes] int8.
        codes: [numel] int8.
        exponents: [numel / SIZE] uint8, of the scales, plus 127.
        absent: the parameter's data between uses: a NaN of the weight's shape without memory.
        holders: the number of uses in progress, in all threads. The values exist while it is not 0.
    """

    def __init__(
        self,
        weight: Tensor,
        device: torch.device | None = None,
        start: int = 0,
        partition: Tensor | None = None,
    ) -> None:
        self.start, self.partition = start, partition
        values, n = weight.detach().to(device or weight.device), weight.numel()
        self.stored = values.new_empty(nbytes(n), dtype=torch.int8)
        self.codes, self.exponents = self.stored[:n], self.stored[n:].view(torch.uint8)
        self.absent = values.new_full((), torch.nan).expand(weight.shape)
        self.holders, self.lock = 0, threading.RLock()
        self.has_stepped = False  # whether a step has rounded the values that others still hold
        self.copy: Callable[[], Tensor | None] = lambda: None  # a copy that somebody still has
        self.encode(values)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.codes.numel()

    def place(self, param: Tensor) -> Tensor:
        """Returns the tensor that has the values while they exist: ``param``, or its partition."""
        return param if self.partition is None else self.partition

    def encode(self, values: Tensor, key: int | None = None) -> None:
        """Stores values: rounded stochastically by ``key``, or to nearest without a key.

        Random bits have a resolution of 2**-16 codes. Only values below 2**-9 codes have a smaller
        fraction, because bf16 has 8 significant bits. They lose 2**-17 codes on average.
        """
        flat = values.reshape(-1)
        if devices.supports(flat.device):
            launches.encode_int8(flat, self.codes, self.exponents, self.start, key)
            return
        block = BLOCK if flat.device.type == "cpu" else GPU_BLOCK
        for start in range(0, len(flat), block):
            x = flat[start : start + block].float().view(-1, SIZE)
            exponents = _exponents(x)
            x.div_(scales_of(exponents).unsqueeze(1))
            if key is None:
                x.round_()
            else:
                bits = x.mul_(2**16).floor_().to(torch.int32)
                add_noise_(bits.view(-1), key, self.start + start)
                x = bits.bitwise_right_shift_(16).to(x.dtype)
                # Stored anew, values below 64 codes would get half the scale: they get it here.
                doubled = ((x.abs().amax(1) == 63) & (exponents > 1)).to(exponents.dtype)
                x.mul_(1 + doubled.unsqueeze(1))
                exponents.sub_(doubled)
            self.codes[start : start + block] = x.view(-1)
            self.exponents[start // SIZE : (start + block) // SIZE] = exponents

    def hold(self, param: Tensor) -> None:
        """Begins a use of the values."""
        with self.lock:
            if not self.holders:
                _show(self.place(param), self.values())
            self.holders += 1

    def release(self, param: Tensor) -> None:
        """Ends a use. The last one takes the values away from the parameter.

        A parameter with data of another shape is stored anew. With another dtype it keeps its data.
        """
        with self.lock:
            self.holders -= 1
            place = self.place(param)
            if not self.holders and find(param) is self:
                if not self.is_replaced(place):
                    _hide(place, self.absent)
                else:
                    del _stored[param]
                    if place.dtype == self.absent.dtype and fits(place.shape):
                        store(param)
            elif self.has_stepped:
                decode(self.stored, place.detach())
            self.has_stepped = False

    def is_replaced(self, place: Tensor) -> bool:
        """Returns whether a program has given the parameter data of another kind."""
        kinds = [(x.shape, x.dtype, x.device) for x in (place, self.absent)]
        return kinds[0] != kinds[1]

    def values(self) -> Tensor:
        """Returns the values in new memory."""
        with torch.inference_mode(False), torch.no_grad():  # they may be trained later
            new = torch.empty_like(self.absent, memory_format=torch.contiguous_format)
            return decode(self.stored, new)


def _exponents(x: Tensor) -> Tensor:
    """The exponents of groups, [n, SIZE] -> [n]; 1 is that of bf16's smallest normal number."""
    most = x.abs().amax(1)
    mantissa, exponent = torch.frexp(most)  # most = mantissa * 2**exponent, mantissa in [1/2, 1)
    exponent = (exponent + 120 + (mantissa > 127 / 128)).clamp_(min=1)
    return exponent.masked_fill_(most.isfinite().logical_not_(), 255).to(torch.uint8)


def scales_of(exponents: Tensor) -> Tensor:
    """Returns bf16 scales; NaN for groups with an element that is not finite, whose byte is 255."""
    bits = exponents.to(torch.int16) << 7
    return bits.add_(exponents == 255).view(torch.bfloat16)


def decode(stored: Tensor, values: Tensor) -> Tensor:
    """Overwrites ``values`` by codes times scales, [bytes] or [runs, bytes]; returns it."""
    if devices.supports(values.device):
        return launches.decode_int8(stored.view(-1, stored.shape[-1]), values, SIZE)
    n = values.numel() * stored.shape[-1] // stored.numel()
    codes = stored[..., :n].unflatten(-1, (-1, SIZE))
    scales = scales_of(stored[..., n:].view(torch.uint8)).unsqueeze(-1)
    torch.mul(codes, scales, out=values.view(codes.shape))
    return values


_stored: "WeakTensorKeyDictionary" = WeakTensorKeyDictionary()  # parameter: its Int8Weight


def fits(shape: Sequence[int], runs: int = 1) -> bool:
    """Returns whether a weight of this shape is large enough, and equal runs have whole groups."""
    numel = math.prod(shape)
    return len(shape) >= 2 and numel >= MIN_NUMEL and numel % (SIZE * runs) == 0


def nbytes(numel: int) -> int:
    """Returns the bytes that store ``numel`` elements."""
    return numel + numel // SIZE


def find(param: Tensor) -> Int8Weight | None:
    """Returns the codes of a parameter; None if its weights are not stored in 8 bits."""
    return _stored.get(param) if _stored.data else None


def store(
    param: Tensor,
    device: torch.device | None = None,
    partition: Tensor | None = None,
    start: int = 0,
) -> None:
    """Replaces the values of a bf16 parameter by codes, on ``device``.

    If ZeRO-3 has divided the parameter, replaces this rank's ``partition``, from ``start`` on.
    """
    weight = param if partition is None else partition
    _stored[param] = held = Int8Weight(weight, device, start, partition)
    _hide(weight, held.absent)


def restore(param: Tensor) -> None:
    """Gives a parameter its bf16 values back, and drops its codes."""
    if (held := _stored.pop(param)).holders == 0:
        _show(held.place(param), held.values())


@contextlib.contextmanager
def expanded(params: Iterable[Tensor], stores: bool = False) -> Iterator[list[Tensor]]:
    """A context in which parameters have their bf16 values.

    Args:
        params: parameters; those that are not stored in 8 bits stay as they are.
        stores: whether the context may change the values: at its end they are stored, rounded to
            nearest.

    Yields:
        The parameters that are stored in 8 bits.
    """
    found: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        for param in params:
            if (held := find(param)) is not None:
                held.hold(param)
                stack.callback(held.release, param)
                found.append(param)
        try:
            yield found
        finally:
            for param in filter(find, found) if stores else ():
                update(param)


@contextlib.contextmanager
def codes_as_data(params: Iterable[Tensor]) -> Iterator[None]:
    """A context in which the data of parameters is their codes, as bf16 numbers [bytes / 2]."""
    stored = [(param, held) for param in params if (held := find(param)) is not None]
    for param, held in stored:
        _show(param, held.stored.view(param.dtype))
    try:
        yield
    finally:
        for param, held in stored:
            _hide(param, held.absent)


def write(param: Tensor, values: Tensor) -> None:
    """Stores new values, [numel], rounded to nearest."""
    with expanded([param], stores=True) as found:
        for stored in found:
            _stored[stored].place(stored).detach().view(-1).copy_(values)


def decoded(param: Tensor) -> Tensor:
    """Returns a copy of a parameter's values in the host's memory, with edits in progress.

    While a caller holds it, it is the same tensor: a state dict has one copy of tied weights.
    """
    held: Int8Weight = _stored[param]
    with expanded([param] if held.holders else ()) as edited:
        now = Int8Weight(held.place(param), start=held.start) if edited else held
    values = decode(now.stored.cpu(), held.absent.new_empty(held.absent.shape, device="cpu"))
    last = held.copy()
    if last is not None and torch.equal(last, values):
        return last
    held.copy = weakref.ref(values)
    return values


def update(param: Tensor, key: int | None = None) -> None:
    """Stores the changed values of an expanded parameter, as ``Int8Weight.encode``.

    If the codes change, its version counter increases, because the values are rounded.
    """
    held = _stored[param]
    place = held.place(param)
    if held.is_replaced(place):
        return  # until the last holder leaves
    values, before = place.detach(), held.stored.clone() if key is None else None
    held.encode(values, key)
    if before is None or not torch.equal(before, held.stored):
        torch.autograd.graph.increment_version(place)
    held.has_stepped = key is not None


def _show(place: Tensor, values: Tensor) -> None:
    """Gives a tensor its values."""
    with torch._C.DisableTorchFunctionSubclass():
        place.data = values
    place.__class__ = _SHOWN.get(type(place), type(place))


def _hide(place: Tensor, absent: Tensor) -> None:
    """Takes the values of a tensor away."""
    place.__class__ = _FREED[type(place)]
    with torch._C.DisableTorchFunctionSubclass():
        place.data = absent


def _no_values(name: str) -> RuntimeError:
    """The error for an operation that needs values."""
    return RuntimeError(
        f"{name}: a weight that is stored in 8 bits has values only while its module computes. To "
        "read or edit it, wrap the call in `with ds_ext.expand_int8(param):`, at ZeRO stage 3 in "
        "`with deepspeed.zero.GatheredParameters(param, modifier_rank=0):`. Convert, resize or "
        "reparametrize a weight before it is stored."
    )


class Freed(Tensor):
    """A tensor whose values do not exist. Operations that need them raise RuntimeError."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs ``func`` if it needs no values; ``copy_`` stores what it copies."""
        me: Any = args[0] if args else None
        kwargs = kwargs or {}
        source = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
        if func is Tensor.copy_ and find(me) and not isinstance(source, Freed):
            with expanded([me], stores=True):
                return func(*args, **kwargs)
        if func in (torch.autograd.grad, torch.autograd.backward):
            args, kwargs = pytree.tree_map_only(Freed, get_gradient_edge, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _CONVERSIONS:
                converted = func(*args, **kwargs)
                if not isinstance(me, Freed):  # ``x.to(p)``
                    return converted
                if (converted.dtype, converted.device) == (me.dtype, me.device):
                    return me
            elif func in _ALLOWED:
                return func(*args, **kwargs)
            elif func in _VIEWS and (isinstance(me, Freed) or find(me)):  # a thread may show it now
                view = func(*args, **kwargs)
                view.__class__ = Freed
                return view
            elif func == Tensor.data.__set__ and args[1] is me:  # type: ignore[attr-defined]
                return None  # ``module.to`` has converted nothing
        is_property = func.__name__ in ("__get__", "__set__")
        raise _no_values(func.__self__.__name__ if is_property else func.__name__)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """Returns a copy in bf16, which is not stored in 8 bits."""
        return self._in_bf16("__deepcopy__", memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickles the values in bf16."""
        return self._in_bf16("__reduce_ex__", protocol)

    def _in_bf16(self, method: str, *args: object) -> Any:
        with expanded([self]) as found:
            if not found:  # a view, or a partition
                raise _no_values(method)
            return getattr(self, method)(*args)

    def set_(self, *_: object, **__: object) -> NoReturn:
        """Raises RuntimeError; torch does not pass ``set_`` to ``__torch_function__``."""
        raise _no_values("set_")

    def as_subclass(self, *_: object) -> NoReturn:
        """Raises RuntimeError; torch does not pass it either."""
        raise _no_values("as_subclass")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Describes the tensor without its values."""
        return f"{type(self).__name__}({[*self.shape]}, {self.dtype}, stored in 8 bits)"


class FreedParameter(Freed, nn.Parameter):
    """A parameter whose values do not exist."""


_OF_VALUES = {"data", "real", "imag", "T", "H", "mT", "mH", "volatile", "_cdata"}
_PROPERTIES = [
    each
    for name in dir(Tensor)
    if hasattr(each := getattr(Tensor, name), "__set__") and name not in _OF_VALUES
]
_VIEWS = {Tensor.detach, Tensor.view_as, Tensor.expand_as}  # as views of nothing
_CONVERSIONS = {Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.bfloat16}
_ALLOWED = {
    *(each.__get__ for each in _PROPERTIES),
    *(each.__set__ for each in _PROPERTIES),
    *(
        getattr(Tensor, name)
        for name in (
            "__format__ __hash__ __len__ dim element_size get_device is_complex is_contiguous "
            "is_floating_point is_inference nelement numel register_hook "
            "register_post_accumulate_grad_hook requires_grad_ retain_grad size stride"
        ).split()
    ),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.is_floating_point),
    *(torch._has_compatible_shallow_copy_type,),
}
_FREED: dict[type, type] = {nn.Parameter: FreedParameter, Tensor: Freed}
_SHOWN = {freed: shown for shown, freed in _FREED.items()}
