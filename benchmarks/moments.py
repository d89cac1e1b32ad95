"""Compares AdamW with 8-bit moments (FlashAdamW) with torch's AdamW, whose moments are fp32.

It trains a byte-level Llama from scratch on real text, with the same batches for each optimizer:
torch's AdamW in fp32, FlashAdamW with fp32 and with bf16 weights, and 8-bit codes without
companding. Run ``python -m benchmarks.moments``. It takes about four minutes on one core.
"""

import datetime
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor

from benchmarks.rounding import (
    BATCH,
    LENGTH,
    RESULTS,
    Run,
    held_out,
    model,
    plot,
    spread,
    table,
    text,
)

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import ds_ext  # noqa: E402
from ds_ext import ops  # noqa: E402
from ds_ext.hyperparams import Fraction, NonNegative, Positive  # noqa: E402
from ds_ext.ops import companding  # noqa: E402
from ds_ext.ops.shard import Block, Shard  # noqa: E402
from ds_ext.rules import base  # noqa: E402
from ds_ext.rules.adam import Adam  # noqa: E402

STEPS, WARMUP, LR = 300, 30, 3e-3
LAST = 50  # the number of last steps whose training loss is averaged
SEEDS = (1, 2, 3, 4, 5)


class LinearGroups(companding._Groups):
    """Groups of 32 signed numbers with evenly spaced codes, which store the moments directly."""

    most: ClassVar[int] = 127

    def block(self, b: Block) -> Tensor:
        """Returns a block's values."""
        code, scale = self._read(b)
        return companding._values(code.mul_(scale / self.most), b)

    def write_(self, b: Block, new: Tensor) -> None:
        """Writes a block."""
        x, scale = companding._grouped(new)
        self._write(b, (x * (self.most / scale)).add_(0.5).floor_().clamp_(max=self.most), scale)


class LinearSquares(LinearGroups):
    """Groups of 32 non-negative numbers with evenly spaced codes."""

    most = 255


class Linear(companding.Companded):
    """FlashAdamW's format with evenly spaced codes."""

    def opened(self, kept: dict[str, Tensor]) -> LinearGroups:
        """Returns the values of a state that ``state_spec`` describes."""
        return LinearGroups(kept) if self.signed else LinearSquares(kept)


@base.register(paper="2602.23349", state="2.125/d", rounds="0")
@dataclass(frozen=True)
class LinearAdamW:
    """FlashAdamW without companding."""

    lr: NonNegative = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 1e-2

    def state_spec(self, shard: Shard) -> Any:
        return self.adam.shard_state_spec(shard)

    def step(self, p: Any, g: Any, s: Any, t: int, shard: Shard) -> base.Rounds:
        u, p, shard = yield from self.adam.step(p, g, s, shard, *self.adam.biases(t))
        ops.apply_(p, u, shard, lr=self.lr, weight_decay=self.weight_decay)

    @property
    def adam(self) -> Adam:
        """The moments."""
        return Adam(self.betas, self.eps, (Linear(signed=True), Linear(signed=False)))


Make = Callable[[Any, int], torch.optim.Optimizer]


def flash(weight_update: str = "stochastic") -> Make:
    return lambda params, seed: ds_ext.FlashAdamW(
        params, lr=LR, weight_update=weight_update, seed=seed
    )


WAYS: dict[str, tuple[torch.dtype, Make]] = {
    "AdamW of torch, fp32": (torch.float32, lambda p, seed: torch.optim.AdamW(p, lr=LR)),
    "FlashAdamW, fp32 weights": (torch.float32, flash()),
    "FlashAdamW, bf16 weights, master24": (torch.bfloat16, flash("master24")),
    "FlashAdamW, bf16 weights, stochastic": (torch.bfloat16, flash()),
    "8 bits not companded, fp32 weights": (
        torch.float32,
        lambda params, seed: ds_ext.LinearAdamW(params, lr=LR, seed=seed),
    ),
}
EXACT = "AdamW of torch, fp32"


def main() -> None:
    """Trains each model, and writes the table and the plot."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    train, test = text("devil_train.jsonl"), text("devil_test.jsonl")
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for seed in SEEDS:
        for way, (dtype, make) in WAYS.items():
            module = model().to(dtype)
            losses = fit(module, train, make(module.parameters(), seed), seed)
            runs[way].append(Run(losses, held_out(module, test)))
            last = sum(losses[-LAST:]) / LAST
            print(f"seed {seed}, {way}: {last:.4f}, {runs[way][-1].held_out:.4f}", flush=True)
    minutes = (time.perf_counter() - began) / 60
    size = sum(p.numel() for p in model().parameters())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "moments.md").write_text(report(runs, size, minutes))
    plot(runs, RESULTS / "moments.png", EXACT, 20, (2, 6))


def fit(
    module: torch.nn.Module, data: Tensor, optimizer: torch.optim.Optimizer, seed: int
) -> list[float]:
    """Trains on random pieces of ``data`` chosen by ``seed``; returns the loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    pieces = data.unfold(0, LENGTH, 1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / WARMUP, (STEPS - t) / (STEPS - WARMUP))
    )
    losses = []
    for _ in range(STEPS):
        batch = pieces[torch.randint(len(pieces), (BATCH,), generator=generator)]
        loss = module(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def report(runs: dict[str, list[Run]], size: int, minutes: float) -> str:
    """Returns the table in Markdown: means over seeds, and differences from fp32."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"""# Moments of 8 bits

A byte-level Llama of {size:,} parameters is trained from scratch on *The Devil's Dictionary* for
{STEPS} steps of {BATCH} × {LENGTH} bytes. The learning rate is {LR:g} after {WARMUP} steps of
warm-up, and then decays to 0; weight decay is 0.01. Losses are in nats per byte. ± is the standard
deviation over {len(SEEDS)} seeds of the order of the data. Differences are relative to the fp32 run
with the same seed and therefore the same batches. "Not companded" has the same groups and scales,
but evenly spaced codes that store the moments directly.

| optimizer | training loss, last {LAST} steps | difference | held-out loss | difference |
|---|---|---|---|---|
{table(runs, EXACT, LAST, shown)}

2 CPU cores, one thread, {minutes:.1f} minutes in all; {datetime.date.today()}; {versions}.
Made by `python -m benchmarks.moments`. Losses over steps:

![training losses](moments.png)
"""


def shown(values: list[float], sign: str = "") -> str:
    """Returns the mean and spread, or the number of seeds without a result."""
    finite = [x for x in values if math.isfinite(x)]
    if len(finite) < len(values):
        rest = f"; else {max(finite):.2f} at most" if finite else ""
        return f"not finite in {len(values) - len(finite)} of {len(values)} seeds{rest}"
    return spread(values, sign)


if __name__ == "__main__":
    main()
