"""From passes to kernels: what a pass reads, as a row of a table; many passes, as one launch.

An op asks here first. Where its tensors lie on a GPU and a kernel can read all of its runs, the
pass becomes a ``Request``; else the op does it itself. Within ``together`` requests wait: those of
several rules that are the same kernel over different parameters are then launched as one, in the
order of each rule. Without Triton nothing is ever taken.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ds_ext.ops.shard import Shard

if TYPE_CHECKING:
    from ds_ext.ops.triton import kernels

Number: TypeAlias = Tensor | float  # a tensor [] is read on the device when the kernel runs
DEVICES = {"cuda"}  # whose tensors kernels take
MATRICES = 128  # of a parameter, at most, whose rows and columns kernels add up
TOGETHER = 1024  # parameters of a launch at most: each program looks for its own among them


@dataclass(frozen=True)
class Kept:
    """A weight that a kernel can read and write."""

    run: Tensor
    how: str = "PLAIN"  # or STOCHASTIC, SPLIT, COPIED: see weight_update.py
    aux: Tensor | None = None
    key: int = 0


@dataclass(frozen=True)
class Source:
    """What a pass reads: a form of kernels.py, and what that needs."""

    form: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    kept: Kept | None = None  # weights that are read: as IS_WEIGHT, or added · decay

    def plus(self, form: str, tensors: Mapping[str, Tensor], **numbers: Number) -> "Source":
        """The same in a form that needs more."""
        return replace(
            self,
            form=form,
            tensors={**self.tensors, **tensors},
            numbers={**self.numbers, **numbers},
        )


def source_of(x: Any) -> Source | None:
    """What a run is to a kernel; None if no kernel can read it."""
    if isinstance(x, Tensor):
        return Source("IS_RUN", {"x": x})
    if hasattr(x, "kept"):
        return Source("IS_WEIGHT", kept=x.kept())
    return x.source() if hasattr(x, "source") else None


def kept_of(p: Any) -> Kept | None:
    """What a weight is to a kernel; None if no kernel can write it."""
    if isinstance(p, Tensor):
        return Kept(p)
    return p.kept() if hasattr(p, "kept") else None


@dataclass(frozen=True)
class Request:
    """A kernel over one parameter."""

    kernel: str
    constants: tuple[tuple[str, Any], ...]
    programs: int
    geometry: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Number]

    @property
    def device(self) -> torch.device:
        """Returns where its tensors lie."""
        return next(iter(self.tensors.values())).device

    @property
    def is_aligned(self) -> bool:
        """Whether no vector of the kernel's runs crosses the end of a row or of the run."""
        at, unit = self.geometry, kernels.ALIGNMENT
        if not {"start", "n", "cols"} <= at.keys():
            return False  # reads no runs
        return all(at[name] % unit == 0 for name in ("start", "n", "cols")) and all(
            x.data_ptr() % unit == 0 for x in self.tensors.values()
        )


class Batch(threading.local):
    """Requests that wait, by rule, and the sums that are folded up after them."""

    def __init__(self) -> None:
        self.is_open = False
        self.rules: list[list[Request]] = [[]]
        self.folds: list[Request] = []


_batch = Batch()


@contextlib.contextmanager
def together() -> Iterator[Callable[[], None]]:
    """Collects passes, and launches them at the end; call what is yielded between two rules.

    What is collected has not run before: only passes that come later may read its results.
    """
    _batch.is_open = True
    try:
        yield lambda: _batch.rules.append([])
    except BaseException:
        _taken()
        raise
    finally:
        _batch.is_open = False
    launch()


def _taken() -> tuple[list[list[Request]], list[Request]]:
    """What waits, which then does no more."""
    waiting = _batch.rules, _batch.folds
    _batch.rules, _batch.folds = [[]], []
    return waiting


def launch() -> None:
    """Launches what waits: kernel by kernel, what each rule asked for in its order."""
    rules, folds = _taken()
    for i in range(max(map(len, rules))):
        alike: dict[tuple[Any, ...], list[Request]] = {}
        for request in (requests[i] for requests in rules if i < len(requests)):
            kind = request.device, request.kernel, request.constants, request.is_aligned
            alike.setdefault(kind, []).append(request)
        for group in alike.values():
            _run_in_parts(group)
    for device in dict.fromkeys(fold.device for fold in folds):
        _run_in_parts([fold for fold in folds if fold.device == device])


def _run_in_parts(requests: Sequence[Request]) -> None:
    for first in range(0, len(requests), TOGETHER):
        _run(requests[first : first + TOGETHER])


def _ask(request: Request, folds: Sequence[Request] = ()) -> None:
    if request.programs:
        _batch.rules[-1].append(request)
        _batch.folds.extend(folds)
        if not _batch.is_open:
            launch()


def tried(kernel: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an op ask ``kernel``, which takes the same and returns NotImplemented for "do it"."""

    def decorate(op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def asked(*args: Any, **numbers: Number) -> Any:
            made = kernel(*args, **numbers)
            if made is NotImplemented:
                launch()  # what the op reads may wait
                return op(*args, **numbers)
            return made

        return asked

    return decorate


def _takes(like: Any, shard: Shard) -> bool:
    is_ours = like.device.type in DEVICES and like.dtype != torch.float64
    return is_ours and (shard.split is None or len(list(shard.pieces())) < 2) and _are_there()


@functools.cache
def _are_there() -> bool:
    """Whether Triton is installed; imports the kernels, which takes Triton with them."""
    try:
        from ds_ext.ops.triton import kernels
    except ImportError:  # a torch without Triton: the ops serve
        return False
    globals()["kernels"] = kernels
    return True


def _takes_matrices(like: Any, shard: Shard) -> bool:
    """The same of sums over rows and columns, and of quotients by them.

    Each matrix has tiles of its own and sums to be folded up: the ops are better at stacks of many.
    """
    return shard.mats <= MATRICES and _takes(like, shard)


def _reads(source: Source | None, like: Any, shard: Shard) -> bool:
    """Whether a kernel can read this."""
    is_matrix = source is not None and source.form in _MATRIX_FORMS
    return source is not None and (_takes_matrices if is_matrix else _takes)(like, shard)


def _alone(shard: Shard) -> tuple[Shard, slice, slice]:
    """A run as that of a matrix of its own, and the rows and columns which that is of the whole.

    So that a kernel need not know of the box that a rank of tensor parallelism holds.
    """
    if shard.split is None:
        return shard, slice(None), slice(None)
    for box, start, stop in shard.pieces():
        rows, cols = (slice(at, at + n) for at, n in (box[:2], box[2:]))
        return Shard((box.rows, box.cols), start, stop, shard.size), rows, cols
    return Shard((shard.rows, shard.cols), 0, 0, 1), slice(None), slice(None)


def _new(*shape: int, device: torch.device) -> Tensor:
    """Memory for what kernels write, which is all fp32."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def _zeros(shard: Shard, device: torch.device, *sizes: int) -> list[Tensor]:
    """Zeros [mats, n] for each of ``sizes``, of one tensor: a launch for all."""
    parts = (
        _new(shard.mats * sum(sizes), device=device).zero_().split([shard.mats * n for n in sizes])
    )
    return [x.view(shard.mats, n) for x, n in zip(parts, sizes, strict=True)]


def square_sums(runs: Sequence[Any], shard: Shard, like: Any) -> Any:
    """Asks for the kernel of ``passes.square_sums``; NotImplemented where none can do it."""
    sources = [s for x in runs if (s := source_of(x)) is not None]
    if len(sources) < len(runs) or not all(_reads(s, like, shard) for s in sources):
        return NotImplemented
    totals = list(_new(len(runs), device=like.device).zero_().unbind())
    for source, total in zip(sources, totals, strict=True):
        made = _pass("squares", source, shard)
        part = _new(made.programs, device=like.device)
        _ask(replace(made, tensors={**made.tensors, "part": part}), [_fold(part, 1, total)])
    return totals


def matrix_square_sums(x: Any, shard: Shard, like: Any) -> Any:
    """Asks for the kernel of ``passes.matrix_square_sums``; NotImplemented where none can do it."""
    source = source_of(x)
    if not _takes_matrices(like, shard) or source is None:
        return NotImplemented
    row, col = _zeros(shard, like.device, shard.rows, shard.cols)
    made = _pass("statistics", source, shard, is_matrix=True)
    if made.programs:
        at = made.geometry
        own, rows, cols = _alone(shard)
        by_row, by_col = row[:, rows], col[:, cols]
        mats, across = _mats(own), -(-own.cols // kernels.TC)
        height = at["down"] * kernels.TR
        tall = _new(across, mats, height, device=like.device)
        wide = _new(mats, at["down"], own.cols, device=like.device)
        folds = []
        for i in range(mats):
            out = by_row[at["mat0"] + i, at["row0"] : at["row0"] + height]
            folds.append(_fold(tall[:, i], mats * height, out))
            folds.append(_fold(wide[i], own.cols, by_col[at["mat0"] + i]))
        made = replace(made, geometry={**at, "height": mats * height})
        _ask(replace(made, tensors={**made.tensors, "part": tall, "part2": wide}), folds)
    return row, col


def weighed_square_sums(
    x: Any, before: Tensor, eps: float, beta: float, shard: Shard, like: Any
) -> Any:
    """Asks for the kernel of ``passes.weighed_square_sums``; NotImplemented if none can do it."""
    source = source_of(x)
    if not _takes_matrices(like, shard) or source is None or source.form != "IS_RUN":
        return NotImplemented
    if shard.cols > kernels.WIDEST:
        return NotImplemented
    before, share = before * beta + (1 - beta) * eps, (1 - beta) / shard.cols
    row, col, weighed = _zeros(shard, like.device, shard.rows, shard.cols, shard.cols)
    wide = max(kernels.NARROWEST, 1 << (shard.cols - 1).bit_length())
    made = _pass("weighed", source, shard, is_matrix=True, more=(("TC", wide),))
    if made.programs:
        at, (own, rows, _) = made.geometry, _alone(shard)
        mats = _mats(own)
        plain, divided = _new(2, mats, at["down"], shard.cols, device=like.device)
        tensors = {"out": row[:, rows], "before": before[:, rows], "part": plain, "part2": divided}
        folds = []
        for i in range(mats):
            folds.append(_fold(plain[i], shard.cols, col[at["mat0"] + i]))
            folds.append(_fold(divided[i], shard.cols, weighed[at["mat0"] + i]))
        numbers = {**made.numbers, "share": share}
        _ask(replace(made, tensors={**made.tensors, **tensors}, numbers=numbers), folds)
    return row, col, weighed


def factors_(
    row: Tensor,
    col: Tensor,
    sums: tuple[Tensor, ...],
    eps: float,
    beta: float,
    clip: float,
    shard: Shard,
) -> Any:
    """Asks for the kernel of ``passes.factors_``; NotImplemented where none can do it."""
    if not _takes_matrices(row, shard) or not shard.numel:
        return NotImplemented
    by_row, by_col = torch.empty_like(row), torch.empty_like(col)
    names = ("part", "part2", "x")[: len(sums)]
    sums = tuple(x.contiguous() for x in sums)
    tensors = {"row": row, "col": col, "out": by_row, "v": by_col}
    tensors |= dict(zip(names, sums, strict=True))
    geometry = {"mats": shard.mats, "rows": shard.rows, "cols": shard.cols}
    numbers = {"share": 1 - beta, "b": eps, "bound": clip, "a": 1.0 / shard.numel}
    clips = (("CLIPS", len(sums) > 2),)
    _ask(Request("factors", clips, 1, geometry, tensors, numbers))
    return by_row.unsqueeze(-1), by_col.unsqueeze(-2)


def squares_(x: Any, shard: Shard, like: Any) -> Any:
    """Asks for the kernel of ``passes.squares``; NotImplemented where none can do it."""
    if not _reads(source_of(x), like, shard):
        return NotImplemented
    out = _new(shard.numel, device=like.device).zero_()
    _advance(out[shard.start : shard.stop], x, 0.0, 1.0, shard)
    return out


def lerp_(m: Any, x: Any, weight: float, shard: Shard) -> Any:
    """Asks for the kernel of ``passes.lerp_``; NotImplemented where none can do it."""
    return _advance(m, x, None, weight, shard)


def square_lerp_(v: Any, x: Any, eps: float, weight: float, shard: Shard) -> Any:
    """Asks for the kernel of ``passes.square_lerp_``; NotImplemented where none can do it."""
    return _advance(v, x, eps, weight, shard)


def _advance(m: Any, x: Any, eps: float | None, weight: float, shard: Shard) -> Any:
    source = source_of(x)
    if not isinstance(m, Tensor) or source is None or not _reads(source, m, shard):
        return NotImplemented
    made = _pass("advance", source, shard, more=(("SQUARED", eps is not None),))
    numbers = {**made.numbers, "share": weight, "b": eps or 0.0}
    _ask(replace(made, tensors={**made.tensors, "out": m}, numbers=numbers))


def apply_(p: Any, u: Any, shard: Shard, *, lr: Number, weight_decay: Number = 0.0) -> Any:
    """Asks for the kernel of ``passes.apply_``; NotImplemented where none can do it."""
    source, kept = source_of(u), kept_of(p)
    if source is None or kept is None or not _reads(source, kept.run, shard):
        return NotImplemented
    if isinstance(weight_decay, Tensor) or weight_decay != 0:
        if source.kept is not None:
            return NotImplemented
        source = source.plus(source.form, {}, decay=weight_decay)
    made = _pass("apply", replace(source, kept=kept), shard)
    _ask(replace(made, numbers={**made.numbers, "lr": lr}))


def mark_(run: Tensor, out: Tensor) -> Any:
    """Asks for the kernel of ``edits._mark_``; NotImplemented where none can do it."""
    return _of_groups("mark", run, {"out": out})


def mend_(run: Tensor, residual: Tensor, marked: Tensor | None) -> Any:
    """Asks for the kernel of ``edits.mend_``; NotImplemented where none can do it."""
    before = {} if marked is None else {"before": marked}
    constants = (("MARKED", marked is not None),)
    return _of_groups("mend", run, {"aux": residual, **before}, constants)


def _of_groups(
    kernel: str,
    run: Tensor,
    tensors: Mapping[str, Tensor],
    constants: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """A pass over a bf16 run as groups of elements that share a mark."""
    if run.device.type not in DEVICES or not _are_there():
        return NotImplemented
    width = kernels.GROUP
    geometry = {"start": 0, "n": len(run), "cols": width}
    programs = -(-len(run) // (width * kernels.TR))
    made = Request(kernel, (("TC", width), *constants), programs, geometry, {"w": run}, {})
    return _ask(replace(made, tensors={**made.tensors, **tensors}))


_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MATRIX_FORMS = ("IS_QUOTIENT", "IS_RESIDUAL")


def _pass(
    kernel: str,
    source: Source,
    shard: Shard,
    is_matrix: bool = False,
    more: tuple[tuple[str, Any], ...] = (),
) -> Request:
    """A request for a pass over a run."""
    kept, tensors = source.kept, dict(source.tensors)
    run = tensors.get("x")
    if kept is not None:
        tensors |= {"w": kept.run} | ({} if kept.aux is None else {"aux": kept.aux})
    constants = (
        ("FORM", source.form),
        ("XD", "float32" if run is None else _DTYPES[run.dtype]),
        ("BOUNDED", "bound" in source.numbers),
        ("DECAYS", "decay" in source.numbers),
        ("WD", "float32" if kept is None else _DTYPES[kept.run.dtype]),
        ("KEPT", "PLAIN" if kept is None else kept.how),
        *more,
    )
    if is_matrix or source.form in _MATRIX_FORMS:
        is_strip = kernel == "weighed"
        own, rows, cols = _alone(shard)
        geometry, programs = _by_rows(own, kernels.STRIP if is_strip else 0)
        geometry["origin"] = shard.start
        if "row" in tensors:
            tensors["row"] = tensors["row"][:, rows]
        if "col" in tensors:
            tensors["col"] = tensors["col"][..., cols]
    else:
        geometry, programs = _flat(shard)
    geometry["key"] = 0 if kept is None else kept.key
    numbers = {"factor": 1.0, "scale": 1.0, **source.numbers}
    return Request(kernel, constants, programs, geometry, tensors, numbers)


def _flat(shard: Shard) -> tuple[dict[str, int], int]:
    """A run as rows of one tile's width -> geometry, programs."""
    rows = -(-len(shard) // kernels.TC)
    down = -(-rows // kernels.TR)
    at = {"start": 0, "n": len(shard), "origin": shard.start, "mat0": 0, "row0": 0}
    return at | {"rows": rows, "cols": kernels.TC, "down": down}, down


def _by_rows(shard: Shard, strip: int) -> tuple[dict[str, int], int]:
    """A run as rows, or strips of them, of the matrices it touches -> geometry, programs."""
    at = {"start": shard.start, "n": len(shard), "origin": shard.start}
    at |= {"rows": shard.rows, "cols": shard.cols}
    if not len(shard):
        return at | {"mat0": 0, "row0": 0, "down": 0}, 0
    mats = _mats(shard)
    first, last = shard.start // shard.cols, (shard.stop - 1) // shard.cols
    row0 = first % shard.rows if mats == 1 else 0
    height = last - first + 1 if mats == 1 else shard.rows
    down = -(-height // (strip or kernels.TR))
    across = 1 if strip else -(-shard.cols // kernels.TC)
    return at | {"mat0": first // shard.rows, "row0": row0, "down": down}, mats * down * across


def _mats(shard: Shard) -> int:
    """How many matrices a run touches, which is not empty."""
    size = shard.rows * shard.cols
    return (shard.stop - 1) // size - shard.start // size + 1


def _fold(part: Tensor, stride: int, out: Tensor) -> Request:
    """Sums [k, n or more], ``stride`` apart, over k -> out [n]."""
    n, k = out.numel(), len(part)
    geometry = {"rows": k, "cols": stride, "n": n, "height": k * stride}
    if stride == 1:  # many numbers for one sum
        wide = kernels.TC
        geometry |= {"rows": -(-k // wide), "cols": wide, "n": wide, "total": 1}
    return Request("fold", (), -(-n // kernels.TC), geometry, {"part": part, "out": out}, {})


def _run(requests: Sequence[Request]) -> None:
    """Launches one kernel over the parameters of ``requests``, which are alike but for them.

    On the device that they lie on, which need not be the current one.
    """
    if not requests:
        return
    table: list[dict[str, int]] = []
    floats: list[float] = []
    first = 0
    width = len(kernels.FIELD)
    base = width * len(requests)
    for request in requests:
        line = dict.fromkeys(kernels.FIELD, 0)
        line |= {**request.geometry, "first": first}
        line |= {name: x.data_ptr() for name, x in request.tensors.items()}
        for name, number in request.numbers.items():
            if isinstance(number, Tensor):
                assert number.dtype == torch.float32
                line[name] = number.data_ptr()
            else:
                line[name] = -1 - len(floats)  # its address follows
                floats.append(number)
        table.append(line)
        first += request.programs
    device = requests[0].device
    held = torch.empty(base + len(floats) // 2 + 1, dtype=torch.int64, device=device)
    here = held.data_ptr() + 8 * base
    lines = [[x if x >= 0 else here + 4 * (-1 - x) for x in line.values()] for line in table]
    tail = _on_host(floats + [0.0] * (2 - len(floats) % 2), torch.float32)
    host = torch.cat([_on_host(lines, torch.int64).view(-1), tail.view(torch.int64)])
    held.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)

    named, warps = constants(requests)
    kernel = getattr(kernels, requests[0].kernel)
    with current(device):
        kernel[(first,)](held, len(requests), **named, num_warps=warps)


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current one, which Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _on_host(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def constants(requests: Sequence[Request]) -> tuple[dict[str, Any], int]:
    """The constants of a kernel over the parameters of ``requests``, its number of warps."""
    named = dict(requests[0].constants)
    for name in ("FORM", "KEPT"):
        if name in named:
            named[name] = getattr(kernels, named[name])
    for name in ("XD", "WD"):
        if name in named:
            named[name] = getattr(kernels.tl, named[name])
    warps = kernels.WARPS
    named["COUNT"] = max(16, 1 << (len(requests) - 1).bit_length())
    named |= {"TR": kernels.TR, "TC": kernels.TC} | named
    if requests[0].kernel not in ("fold", "factors"):
        named["ALIGNED"] = all(r.is_aligned for r in requests)
        # each element has an address of its own where there are no vectors: fewer to a thread
        warps = kernels.WARPS if named["ALIGNED"] else 2 * kernels.WARPS
    if requests[0].kernel == "factors":
        named.pop("TR")
        named["TC"], warps = kernels.LONG, kernels.LONG_WARPS
    if requests[0].kernel == "weighed":
        named = {k: v for k, v in named.items() if k not in ("FORM", "DECAYS", "WD", "KEPT")}
        wide = named["TC"]
        named["TR"] = min(kernels.WIDE_ROWS, kernels.WIDE_ELEMENTS // wide)
        # two stages where three would not fit into registers, one where there are no vectors
        fits = named["XD"] != kernels.tl.float32 and wide < kernels.WIDEST
        stages = min(kernels.STAGES, 3 if fits else 2) if named["ALIGNED"] else 1
        named |= {"STRIP": kernels.STRIP, "STAGES": stages}
        warps = min(kernels.WIDE_WARPS, wide // kernels.WIDE_COLS)
    return named, warps
