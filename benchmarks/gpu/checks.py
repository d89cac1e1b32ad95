"""Compares kernels with torch's operations on the same device, from the same gradients.

Torch's operations step each parameter by the rule's text, without a kernel. Two more equalities
need no tolerance: a parameter in a batch has the bits of the parameter alone, and a second run has
the bits of the first. A gradient with NaN must change no bit of its weight and state, and must not
keep other parameters from their step.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting, using_kernels
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.optimizer.nonfinite import DeviceGradFlags, GradCheck
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import REGISTRY

BATCHED = [name for name, entry in REGISTRY.items() if entry.is_batched]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IN_16_BITS = ("stochastic", "nearest", "master", "master24")
STORAGES = {"fp32": ("nearest",), "bf16": IN_16_BITS, "fp16": IN_16_BITS}
RANKS = ((0, 1), (0, 2), (1, 3))  # (rank, ranks): whole parameters, the first and a middle run
STEPS = 3
CLOSE = 1e-5  # error relative to the norm of the update, of fp32 weights and masters
CLOSE_24 = 1e-3  # the same of "master24", whose 8 bits may be rounded either way
APART = 1 / 200  # share of 16-bit weights that may be rounded to the other of two neighbors


def rows(on: Setting) -> Rows:
    """Checks each optimizer with each dtype, storage and rank.

    Many processes do so at once, because each of them compiles kernels for minutes.
    """
    names = on.optimizers or BATCHED
    if on.processes == 1:
        found: Iterable[list[tuple[str, Row]]] = (of_optimizer(name, on) for name in names)
        yield from itertools.chain.from_iterable(found)
        return
    with ProcessPoolExecutor(on.processes, mp_context=get_context("spawn")) as pool:
        for rows_of_one in pool.map(functools.partial(of_optimizer, on=on), names):
            yield from rows_of_one


def of_optimizer(name: str, on: Setting) -> list[tuple[str, Row]]:
    """Returns the rows of an optimizer."""
    of = (on.check_shapes, on.device)
    found = [("Checks", check(name, *case, *of)) for case in cases()]
    pairs = itertools.product(DTYPES, RANKS)
    return found + [("NaN", with_nan(name, dtype, ranks, *of)) for dtype, ranks in pairs]


def cases() -> Iterator[tuple[str, str, tuple[int, int]]]:
    """All dtypes, ways to store weights, and ranks."""
    for dtype, ranks in itertools.product(DTYPES, RANKS):
        for storage in STORAGES[dtype]:
            yield dtype, storage, ranks


class Stepped:
    """One rank's optimizers of some parameters, and the steps that they have made.

    Args:
        name: of the optimizer.
        dtype: of weights and gradients.
        storage: ``weight_update``.
        ranks: (rank, number of ranks). Sums are this rank's own, for kernels and judge alike.
        shapes: of the parameters.
        device: of the parameters.
        together: whether one optimizer steps all parameters; else each has its own.
    """

    def __init__(
        self,
        name: str,
        dtype: str,
        storage: str,
        ranks: tuple[int, int],
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        together: bool = True,
    ) -> None:
        self.params = weights(shapes, dtype, device)
        each = [self.params] if together else [[p] for p in self.params]
        self.optimizers = [optimizer_of(name, some, storage) for some in each]
        if not together:  # random bits depend on a parameter's number
            for i, (optimizer, (param,)) in enumerate(zip(self.optimizers, each, strict=True)):
                optimizer.number_of[param] = i
        self.shards = [Shard.of_rank(tuple(p.shape), *ranks) for p in self.params]
        self.runs = [
            p.detach().view(-1)[s.start : s.start + len(s)]
            for p, s in zip(self.params, self.shards, strict=True)
        ]
        self._random = torch.Generator().manual_seed(1)

    def step(self, checked: bool = False, bad: int | None = None) -> list[Tensor]:
        """Makes a step, and returns the parameters whose gradients it found bad.

        Args:
            checked: whether kernels check the gradients.
            bad: the parameter whose gradient has a NaN in the middle of its run.
        """
        updates = []
        for i, (p, run, s) in enumerate(zip(self.params, self.runs, self.shards, strict=True)):
            whole = torch.randn(p.shape, generator=self._random).to(p.device, p.dtype).view(-1)
            g = whole[s.start : s.start + len(s)].clone()
            if i == bad:
                g[len(g) // 2] = math.nan
            updates.append(RunUpdate(p, run, g, s))
        found = []
        each = [updates] if len(self.optimizers) == 1 else [[u] for u in updates]
        with torch.no_grad():
            for optimizer, some in zip(self.optimizers, each, strict=True):
                judge = _judge(optimizer, some) if checked else None
                optimizer.update(some, lambda total: None, judge)
                optimizer.commit_weight_norms()
                if judge is not None:
                    flagged, _ = judge.flags.read()
                    optimizer.rollback_step(flagged.bad)
                    found += flagged.bad
        return found

    def steps(self, count: int = STEPS) -> "Stepped":
        for _ in range(count):
            self.step()
        return self

    def is_in_kernels(self) -> bool:
        """Returns whether kernels step all parameters in batches, and so can check gradients."""
        shards = dict(zip(self.params, self.shards, strict=True))
        device = self.params[0].device
        return self.optimizers[0].in_batches(shards, device) == shards.keys()

    def stored(self) -> list[Tensor]:
        """This rank's runs of weights with their masters, [len(shard)] each."""
        optimizers = self.optimizers * (len(self.params) if len(self.optimizers) == 1 else 1)
        return [
            optimizer.weights(*of)
            for optimizer, of in zip(
                optimizers, zip(self.params, self.runs, self.shards, strict=True), strict=True
            )
        ]

    def bits(self, param: int) -> list[Any]:
        """Copies of a parameter's whole weight and state, in their order."""
        p = self.params[param]
        leaves = _leaves([p.detach(), self.optimizers[0].state.get(p, {})])
        return [x.clone() if isinstance(x, Tensor) else x for x in leaves]


def _judge(optimizer: RuleOptimizer, updates: Sequence[RunUpdate]) -> GradCheck:
    """The check of gradients that backward makes on a GPU, with this rank's own votes."""
    shards = {u.param: u.shard for u in updates}
    first = optimizer.first_round_checks(shards)
    votes = {
        u.param: torch.where(u.g.double().square().sum().isfinite(), 1.0, 2.0**20).float()
        for u in updates
        if u.param not in first
    }
    return GradCheck(first, votes, DeviceGradFlags(len(updates)))


def check(
    name: str,
    dtype: str,
    storage: str,
    ranks: tuple[int, int],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> Row:
    """Returns whether steps by kernels equal the judge's, and how far apart they are."""
    made = functools.partial(Stepped, name, dtype, storage, ranks, shapes, device)
    with using_kernels(device.type):
        found = made().steps().stored()
        alone = all(map(torch.equal, found, made(together=False).steps().stored()))
        again = all(map(torch.equal, found, made().steps().stored()))
    with using_kernels(None):
        judge = made()
        before = [x.clone().double() for x in judge.runs]
        expected = judge.steps().stored()
    errors = [
        float((a.double() - b.double()).norm() / (b.double() - w).norm())
        for a, b, w in zip(found, expected, before, strict=True)
        if b.numel()
    ]
    error = max(errors) if all(map(math.isfinite, errors)) else math.inf
    differing = sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))
    apart = differing / sum(x.numel() for x in found)
    if dtype == "fp32" or storage == "master":
        is_close = error <= CLOSE
    else:
        is_close = error <= CLOSE_24 if storage == "master24" else error < 1 and apart <= APART
    return {
        "optimizer": OPTIMIZERS[name].__name__,
        "dtype": dtype,
        "weight_update": storage,
        "rank": f"{ranks[0]} of {ranks[1]}",
        "error": error,
        "apart": apart,
        "alone": alone,
        "again": again,
        "verdict": RIGHT if is_close and alone and again else WRONG,
    }


def with_nan(
    name: str,
    dtype: str,
    ranks: tuple[int, int],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> Row:
    """Returns whether a NaN in the second step changes its parameter, or another one."""
    storage, bad = storage_with_nan(dtype), 0
    row: Row = {
        "optimizer": OPTIMIZERS[name].__name__,
        "dtype": dtype,
        "weight_update": storage,
        "rank": f"{ranks[0]} of {ranks[1]}",
    }
    with using_kernels(device.type):
        clean, hit = (Stepped(name, dtype, storage, ranks, shapes, device) for _ in range(2))
        if not hit.is_in_kernels():  # a cut goes through a group of 8-bit moments
            columns = ("reported", "unchanged", "others stepped")
            return row | dict.fromkeys(columns) | {"verdict": "the host checks these gradients"}
        for one in (clean, hit):
            one.step(checked=True)
        before = hit.bits(bad)
        clean.step(checked=True)
        found = hit.step(checked=True, bad=bad)
        is_told = [id(p) for p in found] == [id(hit.params[bad])]
        is_kept = _same(hit.bits(bad), before)
        others = [i for i in range(len(shapes)) if i != bad]
        is_alike = all(_same(hit.bits(i), clean.bits(i)) for i in others)
        is_stepped = not _same(clean.bits(bad), before)  # or the comparison would prove nothing
    good = is_told and is_kept and is_alike and is_stepped
    return row | {
        "reported": is_told,
        "unchanged": is_kept,
        "others stepped": is_alike,
        "verdict": RIGHT if good else WRONG,
    }


def storage_with_nan(dtype: str) -> str:
    """The way to store weights of the checks with a NaN: with the most state that may change."""
    return "nearest" if dtype == "fp32" else "master24"


def _leaves(x: Any) -> Iterator[Any]:
    """The tensors and numbers in nested lists and dicts."""
    if isinstance(x, (Mapping, list, tuple)):
        for one in x.values() if isinstance(x, Mapping) else x:
            yield from _leaves(one)
    else:
        yield x


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x.equal(y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def weights(
    shapes: Sequence[tuple[int, ...]], dtype: str, device: torch.device
) -> list[nn.Parameter]:
    """The same weights at each call."""
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=random).mul_(0.1) for shape in shapes]
    return [nn.Parameter(p.to(device, DTYPES[dtype])) for p in made]


def optimizer_of(name: str, params: Sequence[Tensor], storage: str) -> RuleOptimizer:
    """An optimizer whose steps are larger than a unit of bf16."""
    rate = {} if name == "adafactor" else {"lr": 1e-2}
    return OPTIMIZERS[name](params, weight_update=storage, **rate)
