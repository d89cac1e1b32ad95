"""Time of one optimizer step relative to torch's fused SGD in the same round.

All candidates of a size step the same weights with the same gradients, in turns. ``candidates``
describes what is run of each package. Weights and gradients are random and have one dtype. A first
round, which is not counted, creates the states.
"""

import argparse
import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.memory import DTYPES, LLAMAS, shapes_of
from ds_ext.distributed.placement import Placement
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import zeros
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.optimizer.updates import RunUpdate
from ds_ext.rules import entry_of, lowrank

Make = Callable[["Case"], Callable[[], object]]  # prepares a case -> the step

UNIT, ADAMW = "torch.SGD", "torch.AdamW"
ADALOMO, CAME = "lomo_optim.AdaLomo", "came_pytorch.CAME"
ADAFACTOR, GALORE = "transformers.Adafactor", "galore_torch.GaLoreAdamW"
CPU_ADAM = "deepspeed.CPUAdam"
# On a CPU, torch 2.13's fused SGD does not write bf16 weights (pytorch issue 191763), so its time
# is too short. This one writes them.
PLAIN = "torch.SGD, not fused"
OURS = tuple(f"ds_ext.{cls.__name__}" for cls in OPTIMIZERS.values())
NAMES = (*OURS, PLAIN, ADAMW, CPU_ADAM, ADALOMO, ADAFACTOR, CAME, GALORE)
WAYS = ("stochastic", "nearest")  # to round bf16 weights: ds_ext's default, and that of others
RANK = 128  # GaLore's rank
NEVER = 10**6  # steps between renewals of GaLore's basis
# Short steps are repeated for this many seconds. Their times then do not depend on the caches that
# the previous candidate left, and short disturbances by other processes matter less.
LEAST = 0.05
FEWEST = 3  # rounds of the largest sizes


@dataclass(frozen=True)
class Size:
    """Parameters that are stepped together."""

    shapes: tuple[tuple[int, ...], ...]
    ranks: int = 1  # if larger: only rank 1's runs, stepped by ds_ext only

    @property
    def shards(self) -> list[Shard]:
        return [Shard.of_rank(s, min(1, self.ranks - 1), self.ranks) for s in self.shapes]

    @property
    def elements(self) -> int:
        return sum(map(len, self.shards))


SIZES = {
    "512x512": Size(((512, 512),)),
    "8 of 512x512": Size(((512, 512),) * 8),
    "1024x1024": Size(((1024, 1024),)),
    "4096x4096": Size(((4096, 4096),)),
    "11008x4096": Size(((11008, 4096),)),
    "SmolLM2-135M": Size(tuple(shapes_of(LLAMAS["135M"]).values())),
    "a third of 4096x4097": Size(((4096, 4097),), ranks=3),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--optimizers", nargs="+", choices=NAMES, default=NAMES, help=f"in addition to {UNIT}"
    )
    parser.add_argument("--rounds", type=int, default=7, help="fewer for large sizes")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")


def main(args: argparse.Namespace) -> None:
    """Times all sizes and dtypes, and writes the tables."""
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # DeepSpeed's CPUAdam has its own OpenMP
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    tables: dict[str, list[dict[str, object]]] = {}
    remarks: list[dict[str, object]] = []
    for dtype in args.dtypes:
        found, remarked = able(candidates(dtype, args.optimizers), dtype)
        remarks += remarked
        for size in args.sizes:
            rounds = fewer(args.rounds, SIZES[size].elements)
            times = measure(Case(SIZES[size], dtype), found, rounds, clock)
            gc.collect()  # reference cycles of steps
            heading = f"{size}, {dtype} ({rounds} rounds)"
            tables[heading] = [
                {"candidate": name, f"time / {UNIT}": median, "least": least}
                for name, (median, least) in report.ratios(times, UNIT).items()
            ]
            print(heading, report.table(tables[heading]), sep="\n", flush=True)
    if remarks:
        tables["Remarks"] = remarks
    report.write("step", "Time of one optimizer step", TEXT, tables)


TEXT = """
Times are relative to those of the unit in the same round: the median over rounds, and the minimum.
The unit, torch.SGD, uses `fused=True` and no momentum. torch.AdamW is fused too.
deepspeed.CPUAdam is DeepSpeed's C++ code. With one thread, times are CPU seconds of the process,
which exclude other processes.
All candidates of a size step the same tensors in turns. Each turn begins with a step that is not
timed, because AdaLomo and Adafactor cannot use cached norms of weights that another candidate has
stepped. Weights are 0.02 · randn and gradients 0.1 · randn, both in the named dtype.
Hyper-parameters are defaults. Short steps are repeated within a round. "SmolLM2-135M" has that
model's 272 parameters. "a third of 4096x4097" is rank 1's run of that matrix on 3 ranks. Only
ds_ext steps it; it is compared with SGD on the same number of elements.

On a CPU, torch 2.13's fused SGD does not write bf16 weights (pytorch issue 191763). The unit then
only reads. "torch.SGD, not fused" reads and writes.

Names of ds_ext optimizers contain the rounding of bf16 weights: `stochastic` is the default, and
`nearest` is what the other packages do. GaLore steps only matrices, with rank 128 and a random
basis that is not renewed. For lomo_optim.AdaLomo only the update is timed: its hook is called once
when all gradients exist, without a loss scale. In training its hooks also search all parameters at
each gradient; this time and that of backward are not included.
"""


class Case:
    """Parameters of one size with gradients."""

    def __init__(self, size: Size, dtype: str) -> None:
        self.size, self.dtype = size, DTYPES[dtype]
        random = torch.Generator().manual_seed(0)
        self.params: list[nn.Parameter] = []
        for shard in size.shards:
            shape = shard.shape if self.is_whole else (len(shard),)
            p, g = (torch.randn(shape, generator=random) for _ in range(2))
            self.params.append(nn.Parameter(p.mul_(0.02).to(self.dtype)))
            self.params[-1].grad = g.mul_(0.1).to(self.dtype)

    @property
    def is_whole(self) -> bool:
        return self.size.ranks == 1

    @property
    def matrices(self) -> list[tuple[nn.Parameter, Shard]]:
        parts = zip(self.params, self.size.shards, strict=True)
        return [(p, shard) for p, shard in parts if len(shard.shape) == 2]


def candidates(dtype: str, names: Iterable[str]) -> dict[str, Make]:
    """Returns functions that create each candidate's step. The unit comes first."""
    others: dict[str, Make] = {
        PLAIN: lambda case: torch.optim.SGD(case.params, lr=1e-3, fused=False).step,
        ADAMW: lambda case: torch.optim.AdamW(case.params, lr=1e-3, fused=True).step,
        CPU_ADAM: deepspeed_cpu_adam,
        ADALOMO: published_adalomo,
        ADAFACTOR: transformers_adafactor,
        CAME: published_came,
        GALORE: published_galore,
    }
    made: dict[str, Make] = {
        UNIT: lambda case: torch.optim.SGD(case.params, lr=1e-3, fused=True).step
    }
    for name in names:
        if name in others:
            made[name] = others[name]
        else:
            cls = OPTIMIZERS[name.removeprefix("ds_ext.").lower()]
            made |= {label: ours(cls, way) for label, way in labels(name, dtype).items()}
    return made


def labels(name: str, dtype: str) -> dict[str, str]:
    """Returns the names of a ds_ext optimizer for each way to round weights of this dtype."""
    if DTYPES[dtype] == torch.float32:
        return {name: WAYS[0]}  # fp32 weights are not rounded
    return {f"{name}, {way}": way for way in WAYS}


def groups_of(cls: type[RuleOptimizer], params: list[Tensor]) -> list[dict[str, Any]]:
    """Returns param groups in which a rule for matrices leaves vectors to other rules."""
    entry = entry_of(cls.rule)
    if entry.any_shape:
        return [{"params": params}]
    own, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    groups = [{"params": own}, {"params": rest, **entry.roles["other"]}]
    return [group for group in groups if group["params"]]


def ours(cls: type[RuleOptimizer], way: str) -> Make:
    def make(case: Case) -> Callable[[], object]:
        if cls is not OPTIMIZERS["galoreadamw"]:
            optimizer = cls(groups_of(cls, case.params), weight_update=way)
        else:
            params = [p for p, _ in case.matrices]
            optimizer = cls(params, weight_update=way, rank=RANK, update_proj_gap=NEVER)
            for p, shard in case.matrices:
                state = zeros(optimizer.rule_of(p).state_spec(shard), p)
                q, right = basis(shard.shape, p)
                state["q"] = lowrank.own_basis(q.float(), right, shard)
                optimizer.state[p].update(state, step=1)
        if case.is_whole:
            return optimizer.step
        updates = [
            RunUpdate(p, p.detach(), p.grad, shard)
            for p, shard in zip(case.params, case.size.shards, strict=True)
        ]
        return lambda: optimizer.update(updates, Placement(None))

    return make


def basis(shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, bool]:
    """Returns (orthonormal columns [short side, rank], whether this is the right side)."""
    random = torch.Generator().manual_seed(0)
    columns = torch.randn(min(shape), min(RANK, *shape), generator=random)
    return torch.linalg.qr(columns)[0].to(like), shape[0] >= shape[1]


def published_adalomo(case: Case) -> Callable[[], object]:
    """Makes the published update of all parameters, and restores the dropped gradients."""
    import lomo_optim

    with mock.patch.object(torch.Tensor, "cuda", lambda self: self):
        optimizer = lomo_optim.AdaLomo(nn.ParameterList(case.params), loss_scale=None)
    grads = [p.grad for p in case.params]

    def step() -> None:
        optimizer.step_num += 1
        optimizer.grad_func(0)
        for p, g in zip(case.params, grads, strict=True):
            p.grad = g

    return step


def transformers_adafactor(case: Case) -> Callable[[], object]:
    import transformers

    return transformers.Adafactor(case.params).step


def published_came(case: Case) -> Callable[[], object]:
    import came_pytorch

    return came_pytorch.CAME(case.params, lr=2e-4).step


def published_galore(case: Case) -> Callable[[], object]:
    import galore_torch
    from galore_torch.galore_projector import GaLoreProjector

    params = [p for p, _ in case.matrices]
    keys = {"rank": RANK, "update_proj_gap": NEVER, "scale": 0.25, "proj_type": "std"}
    group = {"params": params, **keys}
    optimizer = galore_torch.GaLoreAdamW([group], lr=1e-3, no_deprecation_warning=True)
    for p in params:
        projector = GaLoreProjector(RANK, update_proj_gap=NEVER, scale=keys["scale"])
        q, right = basis(tuple(p.shape), p)
        projector.ortho_matrix = q.T.contiguous() if right else q
        optimizer.state[p].update(projector=projector, step=1)
    return optimizer.step


def deepspeed_cpu_adam(case: Case) -> Callable[[], object]:
    from deepspeed.ops import adam

    return adam.DeepSpeedCPUAdam(case.params, lr=1e-3).step


def able(made: Mapping[str, Make], dtype: str) -> tuple[dict[str, Make], list[dict[str, object]]]:
    """Returns the candidates that can step small parameters of this dtype, and remarks.

    The remarks list why other candidates cannot, and which candidates leave the weights unchanged.
    """
    found: dict[str, Make] = {}
    remarks: list[dict[str, object]] = []
    for name, make in made.items():
        case = Case(Size(((64, 48), (48, 64), (48,))), dtype)
        before = [p.detach().clone() for p in case.params]
        try:
            make(case)()
        except Exception as error:  # other candidates can still be timed
            why = f"left out: {type(error).__name__}: {error}".splitlines()[0]
        else:
            found[name] = make
            if not all(map(torch.equal, before, case.params)):
                continue
            why = "timed, but does not change the weights"
        remarks.append({"candidate": name, "dtype": dtype, "remark": why})
    return found, remarks


def fewer(rounds: int, elements: int) -> int:
    """Returns the number of rounds of a size: fewer for large sizes."""
    return min(rounds, max(FEWEST, rounds * 2**25 // elements))


def measure(
    case: Case,
    made: Mapping[str, Make],
    rounds: int,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Returns the seconds of each candidate's step in each round."""
    chosen = made
    if not case.is_whole:  # the others step whole parameters
        chosen = {n: m for n, m in made.items() if n.startswith("ds_ext.") or n == UNIT}
    steps = {name: make(case) for name, make in chosen.items()}
    times = {name: repeats(step) for name, step in steps.items()}
    repeated = {name: repeat(step, times[name]) for name, step in steps.items()}
    found = report.interleaved(repeated, rounds, lambda: None, steps, clock)
    return {name: [s / times[name] for s in seconds] for name, seconds in found.items()}


def repeats(step: Callable[[], object]) -> int:
    """Returns how often to repeat a step so that it takes ``LEAST`` seconds."""
    for _ in range(2):  # the first step creates the state
        began = time.perf_counter()
        step()
        took = time.perf_counter() - began
        if took > 20 * LEAST:
            break
    return math.ceil(LEAST / took)


def repeat(step: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            step()

    return run
