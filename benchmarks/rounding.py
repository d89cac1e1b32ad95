"""Loss of fine-tuning with fp32 weights, and with bf16 weights in each ``weight_update``.

It trains a byte-level Llama in fp32 on one half of a text. From these weights it fine-tunes with
AdaLomo on the other half, at the learning rate of AdaLomo's authors, with the same batches in each
run. Run ``python -m benchmarks.rounding``. It takes about five minutes on one core.
"""

import copy
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

os.environ.setdefault("DS_ACCELERATOR", "cpu")
transformers.logging.set_verbosity_error()

from ds_ext import AdaLomo  # noqa: E402

DATA = Path(__file__).parent.parent / "examples" / "data"
RESULTS = Path(__file__).parent / "results"
BATCH, LENGTH = 4, 64
FIRST_STEPS, FIRST_LR = 1000, 1e-2
STEPS, LR = 1000, 5e-4
LAST = 100  # the number of last steps whose training loss is averaged
SEEDS = (1, 2, 3)
WAYS = {
    "fp32": (torch.float32, "nearest"),
    "bf16 stochastic": (torch.bfloat16, "stochastic"),
    "bf16 nearest": (torch.bfloat16, "nearest"),
    "bf16 master": (torch.bfloat16, "master"),
}


@dataclass(frozen=True)
class Run:
    """The losses of a run."""

    losses: list[float]  # the loss of each step
    held_out: float  # with the final weights, computed in fp32

    @property
    def train(self) -> float:
        return statistics.mean(self.losses[-LAST:])


def main() -> None:
    """Trains each model, and writes the table and the plot."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    train, test = text("devil_train.jsonl"), text("devil_test.jsonl")
    start = model()
    fit(start, train[: len(train) // 2], FIRST_STEPS, FIRST_LR, "nearest", seed=0)
    start.bfloat16().float()  # all runs start from values that bf16 can represent
    before = held_out(start, test)
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for seed in SEEDS:
        for way, (dtype, weight_update) in WAYS.items():
            tuned = copy.deepcopy(start).to(dtype)
            losses = fit(tuned, train[len(train) // 2 :], STEPS, LR, weight_update, seed)
            runs[way].append(Run(losses, held_out(tuned, test)))
            print(f"seed {seed}, {way}: {runs[way][-1].train:.4f}, {runs[way][-1].held_out:.4f}")
    RESULTS.mkdir(exist_ok=True)
    minutes = (time.perf_counter() - began) / 60
    size = sum(p.numel() for p in start.parameters())
    (RESULTS / "rounding.md").write_text(report(runs, before, size, minutes))
    plot(runs, RESULTS / "rounding.png", "fp32", LAST, None)


def text(name: str) -> Tensor:
    """Returns the questions and answers of a file as bytes, [n]."""
    rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    whole = "".join(f"{row['instruction']}\n{row['output']}\n\n" for row in rows)
    return torch.tensor(list(whole.encode()))


def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 344}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, **layers, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def fit(
    module: torch.nn.Module, data: Tensor, steps: int, lr: float, weight_update: str, seed: int
) -> list[float]:
    """Trains on random pieces of ``data`` chosen by ``seed``; returns the loss of each step."""
    optimizer = AdaLomo(module.parameters(), lr=lr, weight_update=weight_update, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    pieces = data.unfold(0, LENGTH, 1)
    losses = []
    for _ in range(steps):
        batch = pieces[torch.randint(len(pieces), (BATCH,), generator=generator)]
        loss = module(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def held_out(module: torch.nn.Module, data: Tensor) -> float:
    """Returns the loss on all of ``data``, computed in fp32."""
    batch = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    return copy.deepcopy(module).float()(batch, labels=batch).loss.item()


def spread(values: list[float], sign: str = "") -> str:
    return f"{statistics.mean(values):{sign}.4f} ± {statistics.stdev(values):.4f}"


def report(runs: dict[str, list[Run]], before: float, size: int, minutes: float) -> str:
    """Returns the table in Markdown: means over seeds, and differences from fp32."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"""# What rounding bf16 weights costs

A byte-level Llama of {size:,} parameters is trained in fp32 on one half of *The Devil's Dictionary*
for {FIRST_STEPS:,} steps (AdaLomo, lr {FIRST_LR:g}). From these weights it is fine-tuned on the
other half for {STEPS:,} steps at lr {LR:g}. A step has {BATCH} × {LENGTH} bytes. Forward and
backward use the weights' dtype. Losses are in nats per byte. ± is the standard deviation over
{len(SEEDS)} seeds of the order of the data and of rounding. Differences are relative to the fp32
run with the same seed and therefore the same batches. The held-out loss is computed in fp32 from
the stored weights. It was {before:.4f} before fine-tuning.

| weights | training loss, last {LAST} steps | difference | held-out loss | difference |
|---|---|---|---|---|
{table(runs, "fp32", LAST)}

2 CPU cores, one thread, {minutes:.1f} minutes in all; {datetime.date.today()}; {versions}.
Made by `python -m benchmarks.rounding`. Losses over steps:

![training losses](rounding.png)
"""


def table(
    runs: dict[str, list[Run]], exact: str, last: int, shown: Callable[..., str] = spread
) -> str:
    """Returns the rows: mean losses of the ``last`` steps and held-out, and differences."""
    lines = []
    for way, made in runs.items():
        cells = [way]
        for figure in (lambda run: sum(run.losses[-last:]) / last, lambda run: run.held_out):
            values, base = ([figure(run) for run in found] for found in (made, runs[exact]))
            apart = [a - b for a, b in zip(values, base, strict=True)]
            cells += [shown(values), "" if way == exact else shown(apart, "+")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(
    runs: dict[str, list[Run]], path: Path, exact: str, last: int, limits: tuple[int, int] | None
) -> None:
    """Plots the losses, averaged over the ``last`` steps and over all seeds.

    Args:
        runs: the runs of each setting.
        path: the file to write.
        exact: the setting whose lowest and highest seeds are shown too.
        last: the number of steps in a mean.
        limits: the lowest and highest loss in the plot, or None to show all.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for way, made in runs.items():
        smooth = torch.tensor([run.losses for run in made]).unfold(1, last, 1).mean(-1)
        steps = range(last, last + smooth.shape[1])
        (line,) = axes.plot(steps, smooth.mean(0), label=way)
        if way == exact:
            low, high = smooth.amin(0), smooth.amax(0)
            label = "the same, lowest and highest seed"
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), label=label)
    axes.set(xlabel="step", ylabel=f"training loss, mean of {last} steps (nats per byte)")
    axes.set(ylim=limits)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
