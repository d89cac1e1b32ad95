"""Time of the GPU for a step: steps are queued behind a long kernel, between two events.

Events around one step of an idle GPU measure Python, because the GPU waits for launches. Here the
host launches all steps while the GPU still runs the first kernel. "queued" says whether it did: if
not, the time includes the host's.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks.gpu.setting import Rows, Setting, using_kernels
from benchmarks.memory import shapes_of
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, plain_step
from ds_ext.rules import REGISTRY

BATCHED = [name for name, entry in REGISTRY.items() if entry.is_batched]
CYCLES = 2e9  # of a GPU in a second, at most
COPY, ADAMW = "copy_", "AdamW, torch fused"


def rows(on: Setting) -> Rows:
    """Times steps of square matrices, and of all matrices and vectors of the small model."""
    sets: dict[str, Sequence[tuple[int, ...]]] = {f"{n}²": [(n, n)] for n in on.sides}
    sets["all parameters of the small model"] = list(shapes_of(on.small).values())
    for heading, shapes in sets.items():
        unit: dict[str, float] = {}
        for name in (COPY, ADAMW, *(on.optimizers or BATCHED)):
            with using_kernels(on.device.type):
                ms, host, is_queued = queued(candidate(name, shapes, on.device), on)
            unit[name] = ms
            yield (
                heading,
                {
                    "step": name if name in (COPY, ADAMW) else OPTIMIZERS[name].__name__,
                    "ms": ms,
                    f"ms / {COPY}": ms / unit[COPY],
                    f"ms / {ADAMW}": ms / unit[ADAMW] if ADAMW in unit else None,
                    "host, ms": host,
                    "queued": is_queued,
                },
            )


def candidate(
    name: str, shapes: Sequence[tuple[int, ...]], device: torch.device
) -> Callable[[], object]:
    """A step of bf16 weights, which waits for nothing."""
    make: Mapping[str, object] = {"dtype": torch.bfloat16, "device": device}
    sources = [torch.randn(shape, **make) for shape in shapes]  # type: ignore[call-overload]
    if name == COPY:
        copies = list(map(torch.empty_like, sources))
        return lambda: [to.copy_(x) for to, x in zip(copies, sources, strict=True)]
    params = [nn.Parameter(torch.randn_like(x).mul_(0.1)) for x in sources]
    for param, grad in zip(params, sources, strict=True):
        param.grad = grad
    if name == ADAMW:
        return torch.optim.AdamW(params, lr=1e-5, fused=True).step
    return functools.partial(passes, OPTIMIZERS[name](params), params)


@torch.no_grad()
def passes(optimizer: RuleOptimizer, params: Sequence[Tensor]) -> None:
    """The passes of a step, without the read by which ``optimizer.step()`` ends one."""
    for bucket in plain_step.buckets(params, plain_step.BATCHED_BUCKET_ELEMENTS):
        optimizer.update(plain_step.updates(bucket), None)
        optimizer.commit_weight_norms()


def queued(step: Callable[[], object], on: Setting) -> tuple[float, float, bool]:
    """Times steps in a row.

    Returns:
        Milliseconds of a step on the device, those of the host until it is launched, and whether
        all were launched before the first one ran.
    """
    # Twice, because the first round allocates pinned memory, which makes the host wait.
    host = max(_launched(step, on), _launched(step, on))
    if on.is_rehearsal:
        began = time.perf_counter()
        _launched(step, on)
        return (time.perf_counter() - began) / on.steps * 1e3, host / on.steps * 1e3, False
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int((2 * host + 0.05) * CYCLES))
    before.record()
    host = _launched(step, on, wait=False)
    after.record()
    is_queued = not before.query()
    on.sync()
    return before.elapsed_time(after) / on.steps, host / on.steps * 1e3, is_queued


def _launched(step: Callable[[], object], on: Setting, wait: bool = True) -> float:
    """Makes steps; returns the seconds of the host."""
    began = time.perf_counter()
    for _ in range(on.steps):
        step()
    seconds = time.perf_counter() - began
    if wait:
        on.sync()
    return seconds
