"""What the basis of one micro-batch costs: GaLore-AdamW with gradients kept whole and projected.

A byte-level Llama, trained as in ``benchmarks.rounding``, is fine-tuned with several micro-batches
per step. The same batches and rates are used with ``gradient_policy`` "sharded", whose basis comes
from the sum of all micro-batches, and "projected", whose basis comes from the first.
"""

import argparse
import copy
import itertools

import torch
from torch import Tensor, nn

from benchmarks import report, rounding
from ds_ext import GaLoreAdamW, fuse_into_backward

RANK, PASSES = 32, 8
POLICIES = ("sharded", "projected")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gaps", type=int, nargs="+", default=[200, 20], help="update_proj_gap")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, default=3)


def main(args: argparse.Namespace) -> None:
    """Fine-tunes with each policy, gap, rate and seed, and writes the table."""
    torch.set_num_threads(1)
    train, test = rounding.text("devil_train.jsonl"), rounding.text("devil_test.jsonl")
    start, half = rounding.model(), len(train) // 2
    pretrained = rounding.adalomo("nearest", rounding.FIRST_LR)
    rounding.fit(start, train[:half], rounding.FIRST_STEPS, pretrained, seed=0)
    rows = []
    for gap, lr in itertools.product(args.gaps, args.rates):
        losses: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        kept = {}
        for seed, policy in itertools.product(range(args.seeds), POLICIES):
            tuned = copy.deepcopy(start)
            kept[policy] = fit(tuned, train[half:], args.steps, policy, gap, lr, seed)
            losses[policy].append(rounding.held_out(tuned, test))
        pairs = zip(losses["projected"], losses["sharded"], strict=True)
        rows.append(
            {"update_proj_gap": gap, "lr": lr}
            | {f'held-out loss, "{policy}"': rounding.spread(losses[policy]) for policy in POLICIES}
            | {"difference": rounding.spread([a - b for a, b in pairs], "+")}
            | {f'MiB kept, "{policy}"': kept[policy] / 2**20 for policy in POLICIES}
        )
        print(report.table(rows[-1:]), flush=True)
    before = rounding.held_out(start, test)
    text = TEXT.format(steps=args.steps, before=before, seeds=args.seeds)
    title = "What the basis of one micro-batch costs"
    report.write("projected", title, text, {"Loss and memory": rows}, None)


TEXT = f"""
A byte-level Llama of 2 layers of width 128, trained on one half of *The Devil's Dictionary*, is
fine-tuned on the other half for {{steps}} steps of {PASSES} micro-batches of {rounding.BATCH} x
{rounding.LENGTH} bytes with GaLore-AdamW of rank {RANK}. "sharded" keeps whole gradients until the
step; "projected" keeps projections into a basis from the first micro-batch of each
`update_proj_gap` steps. Losses are in nats per byte, {{before:.4f}} before fine-tuning. ± is the
standard deviation over {{seeds}} seeds of the order of the data; differences are of runs with the
same seed.
"""


def fit(
    module: nn.Module, data: Tensor, steps: int, policy: str, gap: int, lr: float, seed: int
) -> int:
    """Fine-tunes a model; returns the bytes of gradients that wait between micro-batches."""
    optimizer = GaLoreAdamW.for_model(module, lr=lr, rank=RANK, update_proj_gap=gap)
    fused = fuse_into_backward(module, optimizer, gradient_policy=policy)
    generator = torch.Generator().manual_seed(seed)
    pieces, most = data.unfold(0, rounding.LENGTH, 1), 0
    for _ in range(steps):
        for i in range(PASSES):
            rows = torch.randint(len(pieces), (rounding.BATCH,), generator=generator)
            (module(pieces[rows], labels=pieces[rows]).loss / PASSES).backward()
            if i == 0:
                state = fused.state
                runs = [run.g for run in state.kept.values()]
                runs += [x for grad in state.projected.values() for x in grad.values]
                most = max(most, sum(x.nbytes for x in runs))
        optimizer.step()
        optimizer.zero_grad()
    fused.remove()
    return most
