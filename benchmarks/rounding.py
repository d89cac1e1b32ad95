"""Loss of fine-tuning with fp32 weights, with bf16 weights in each ``weight_update``, and with
AdamW's moments in bf16 or 8 bits.

It trains a byte-level Llama in fp32 on one half of a text. From these weights it fine-tunes on the
other half with the same batches in each run: with AdaLomo, at the learning rate of its authors, and
with AdamW. Run ``python -m benchmarks.rounding``. It takes about ten minutes on one core.
"""

import copy
import datetime
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

os.environ.setdefault("DS_ACCELERATOR", "cpu")
transformers.logging.set_verbosity_error()

import ds_ext  # noqa: E402
from ds_ext.ops import int8  # noqa: E402

DATA = Path(__file__).parent.parent / "examples" / "data"
RESULTS = Path(__file__).parent / "results"
BATCH, LENGTH = 4, 64
FIRST_STEPS, FIRST_LR = 1000, 1e-2
LR, ADAM_LR = 5e-4, 1e-4
STEPS = {"AdaLomo": 1000, "AdamW": 500}
LAST = 100  # the number of last steps whose training loss is averaged
SEEDS = (1, 2, 3)
Make = Callable[[Iterable[Tensor], int], torch.optim.Optimizer]  # of parameters and a seed


class NearestAdamW(torch.optim.Optimizer):
    """AdamW with bf16 weights and moments, computed in fp32 and rounded to nearest.

    DeepSpeed's ``bf16_optimizer_states`` stores the same: it requires
    ``bf16_master_weights_and_grads``, so the weights have no master in fp32, and its fused AdamW
    computes in fp32. torch's own AdamW would also round between the operations of a step.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "decay": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                t = s["t"] = s.get("t", 0) + 1
                g, c = p.grad.float(), [1 - beta**t for beta in group["betas"]]
                m, v = (
                    (beta * s[key].float() if key in s else 0) + (1 - beta) * x
                    for key, beta, x in zip("mv", group["betas"], (g, g.square()), strict=True)
                )
                u = m / c[0] / ((v / c[1]).sqrt() + group["eps"])
                lr = group["lr"]
                p.copy_(p.float() * (1 - lr * group["decay"]) - lr * u)
                s["m"], s["v"] = m.to(p.dtype), v.to(p.dtype)


def adalomo(weight_update: str, lr: float = LR) -> Make:
    return lambda params, seed: ds_ext.AdaLomo(
        params, lr=lr, weight_update=weight_update, seed=seed
    )


def of_adam(kind: type, **hypers: Any) -> Make:
    return lambda params, seed: kind(params, lr=ADAM_LR, seed=seed, **hypers)


FP32, BF16 = torch.float32, torch.bfloat16
INT8 = "int8 stochastic"  # the way whose matrices are stored in int8
# By optimizer, ways to store weights and moments: the first is exact.
WAYS: dict[str, dict[str, tuple[torch.dtype, Make]]] = {
    "AdaLomo": {
        "fp32": (FP32, adalomo("nearest")),
        "bf16 stochastic": (BF16, adalomo("stochastic")),
        INT8: (BF16, adalomo("stochastic")),
        "bf16 nearest": (BF16, adalomo("nearest")),
        "bf16 master": (BF16, adalomo("master")),
    },
    "AdamW": {
        "fp32, moments fp32: 12 bytes": (FP32, of_adam(ds_ext.AdamW)),
        "bf16 nearest, moments bf16 nearest, as DeepSpeed: 6 bytes": (
            BF16,
            lambda params, seed: NearestAdamW(params, ADAM_LR),
        ),
        "bf16 stochastic, moments fp32: 10 bytes": (
            BF16,
            of_adam(ds_ext.AdamW, weight_update="stochastic"),
        ),
        f"{INT8}, moments fp32: 9 bytes": (BF16, of_adam(ds_ext.AdamW, weight_update="stochastic")),
        "bf16 stochastic, FlashAdamW: 4.1 bytes": (
            BF16,
            of_adam(ds_ext.FlashAdamW, weight_update="stochastic"),
        ),
        "bf16 master24, FlashAdamW: 5.1 bytes": (
            BF16,
            of_adam(ds_ext.FlashAdamW, weight_update="master24"),
        ),
    },
}
PLOTS = {"AdaLomo": "", "AdamW": "_adamw"}


@dataclass(frozen=True)
class Run:
    """The losses of a run."""

    losses: list[float]  # the loss of each step
    held_out: float  # with the final weights, computed in fp32

    @property
    def train(self) -> float:
        return statistics.mean(self.losses[-LAST:])


def main() -> None:
    """Fine-tunes with both optimizers; writes tables and pictures."""
    torch.set_num_threads(1)
    int8.MIN_NUMEL = 4096  # the model is small
    train, test = text("devil_train.jsonl"), text("devil_test.jsonl")
    start = model()
    fit(start, train[: len(train) // 2], FIRST_STEPS, adalomo("nearest", FIRST_LR), seed=0)
    start.bfloat16().float()  # all runs start from values that bf16 can represent
    before = held_out(start, test)
    page = introduction(before, sum(p.numel() for p in start.parameters()))
    for name, ways in WAYS.items():
        began = time.perf_counter()
        runs: dict[str, list[Run]] = {way: [] for way in ways}
        for seed, (way, (dtype, make)) in itertools.product(SEEDS, ways.items()):
            tuned = copy.deepcopy(start).to(dtype)
            if way.startswith(INT8):
                ds_ext.store_int8(tuned)
            losses = fit(tuned, train[len(train) // 2 :], STEPS[name], make, seed)
            ds_ext.restore_bf16(tuned)
            runs[way].append(Run(losses, held_out(tuned, test)))
            print(f"seed {seed}, {way}: {runs[way][-1].train:.4f}, {runs[way][-1].held_out:.4f}")
        page += section(name, runs, (time.perf_counter() - began) / 60)
        plot(runs, RESULTS / f"rounding{PLOTS[name]}.png", next(iter(runs)))
    (RESULTS / "rounding.md").write_text(page)


def text(name: str) -> Tensor:
    """Returns the questions and answers of a file as bytes, [n]."""
    rows = map(json.loads, (DATA / name).read_text().splitlines())
    whole = "".join(f"{row['instruction']}\n{row['output']}\n\n" for row in rows)
    return torch.tensor(list(whole.encode()))


def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 344}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, **layers, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def fit(module: torch.nn.Module, data: Tensor, steps: int, make: Make, seed: int) -> list[float]:
    """Trains on random pieces of ``data`` chosen by ``seed``; returns the loss of each step."""
    optimizer = make(module.parameters(), seed)
    is_stored = any(map(int8.find, module.parameters()))
    fused = ds_ext.fuse_into_backward(module, optimizer) if is_stored else None
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
    if fused is not None:
        fused.remove()
    return losses


@torch.no_grad()
def held_out(module: torch.nn.Module, data: Tensor) -> float:
    """Returns the loss on all of ``data``, computed in fp32."""
    batch = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    return copy.deepcopy(module).float()(batch, labels=batch).loss.item()


def spread(values: list[float], sign: str = "") -> str:
    return f"{statistics.mean(values):{sign}.4f} ± {statistics.stdev(values):.4f}"


def introduction(before: float, size: int) -> str:
    """Returns the report's first part in Markdown."""
    return f"""# What rounding bf16 weights and moments costs

A byte-level Llama of {size:,} parameters is trained in fp32 on one half of *The Devil's Dictionary*
for {FIRST_STEPS:,} steps (AdaLomo, lr {FIRST_LR:g}). From these weights it is fine-tuned on the
other half: for {STEPS["AdaLomo"]:,} steps with AdaLomo at lr {LR:g}, and for {STEPS["AdamW"]:,}
steps with AdamW at lr {ADAM_LR:g}. A step has {BATCH} × {LENGTH} bytes. Forward and backward use
the weights' dtype. Losses are in nats per byte. ± is the standard deviation over
{len(SEEDS)} seeds of the order of the data and of rounding. Differences are relative to the fp32
run with the same seed and therefore the same batches. The held-out loss is computed in fp32 from
the stored weights. It was {before:.4f} before fine-tuning.

For AdamW, the row "as DeepSpeed" stores what DeepSpeed's `bf16_optimizer_states` stores: weights
and moments in bf16, rounded to nearest, without a master. Bytes are those of a parameter's weight
and moments.
"""


def section(name: str, runs: dict[str, list[Run]], minutes: float) -> str:
    """Returns the table in Markdown: means over seeds, and differences from the first row."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    last = f"training loss, last {LAST} steps"
    return f"""
## {name}

| stored | {last} | difference | held-out loss | difference |
|---|---|---|---|---|
{table(runs, next(iter(runs)))}

2 CPU cores, one thread, {minutes:.1f} minutes in all; {datetime.date.today()}; {versions}.
Made by `python -m benchmarks.rounding`. Losses over steps:

![training losses](rounding{PLOTS[name]}.png)
"""


def table(runs: dict[str, list[Run]], exact: str) -> str:
    """Returns the rows: mean losses of the last steps and held-out, and differences."""
    lines = []
    for way, made in runs.items():
        cells = [way]
        for figure in (lambda run: run.train, lambda run: run.held_out):
            values, base = ([figure(run) for run in found] for found in (made, runs[exact]))
            apart = [a - b for a, b in zip(values, base, strict=True)]
            cells += [spread(values), "" if way == exact else spread(apart, "+")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: dict[str, list[Run]], path: Path, exact: str) -> None:
    """Plots mean losses over ``LAST`` steps and all seeds; of ``exact``, also the extreme seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for way, made in runs.items():
        smooth = torch.tensor([run.losses for run in made]).unfold(1, LAST, 1).mean(-1)
        steps = range(LAST, LAST + smooth.shape[1])
        (line,) = axes.plot(steps, smooth.mean(0), label=way)
        if way == exact:
            low, high = smooth.amin(0), smooth.amax(0)
            label = "the same, lowest and highest seed"
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), label=label)
    axes.set(xlabel="step", ylabel=f"training loss, mean of {LAST} steps (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
