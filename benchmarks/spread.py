"""Compares the bytes that a step sends with ZeRO-3, with FSDP2 and in pipelines on many ranks.

It counts and times steps in the same way as ``scale``. scale.md describes the time model.
"""

import argparse
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import links, outlook, report
from benchmarks.collectives import ALL_GATHER, ALL_REDUCE, Call, sent
from benchmarks.fsdp2 import FullySharded
from benchmarks.giants import MODELS, Counted, made
from benchmarks.links import Takes
from benchmarks.outlook import GROUP, Given
from benchmarks.scale import LINKS
from benchmarks.staged import Staged
from ds_ext.backward.gradient_config import BUCKET_SIZE
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory, muon_cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGE = 500_000_000  # DeepSpeed's default reduce_bucket_size
KINDS = ("AdaLomo", "Adafactor", "CAME")
DENSE = [name for name, model in MODELS.items() if not model.experts]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=DENSE, default=DENSE[0])
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--stages", type=int, default=8, help="pipeline stages")
    parser.add_argument(
        "--micro-batches", nargs="+", type=int, default=[8, 32], help="per step of a pipeline"
    )
    parser.add_argument("--muon-ranks", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--bucket", type=int, default=BUCKET_SIZE, help="reduce_bucket_size")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank and step")
    parser.add_argument("--flops", type=float, default=4e14, help="flops per second of a rank")


class Spread(NamedTuple):
    """A way to spread a model over all ranks."""

    name: str
    counted: Counted
    copies: int = 1  # replicas, among which gradients are all-reduced again


def main(args: argparse.Namespace) -> None:
    """Counts all steps, and writes the tables and the plot."""
    link = next(iter(LINKS))
    given = [Given(LINKS[link], how, args.tokens, args.flops) for how in links.ALGORITHMS]
    found = list(spreads(args))
    tables = {
        "What a step sends": [sends(spread, kind) for spread in found for kind in KINDS],
        "Times of a step": [timed(spread, kind, given) for spread in found for kind in KINDS],
        "A step of Muon": list(muons(args, given)),
    }
    text = TEXT.format(
        model=args.model,
        ranks=args.ranks,
        link=f"{link}: {LINKS[link].latency * 1e6:g} µs, {LINKS[link].bandwidth / 1e9:g} GB/s",
        tokens=args.tokens,
        flops=args.flops,
        bucket=args.bucket,
        group=GROUP,
        deepspeed=metadata.version("deepspeed"),
    )
    title = "A step among many ranks, by how the model is spread"
    report.write("spread", title, text, tables, lambda figure: draw(figure, found, given))


def spreads(args: argparse.Namespace) -> Iterator[Spread]:
    """Yields ZeRO-3, FSDP2 and pipelines on ``args.ranks``, with replicas on further ranks."""
    name, ranks, size = args.model, args.ranks, args.bucket
    yield Spread("ZeRO-3", Counted(name, ranks, size))
    if ranks > GROUP:
        copies = ranks // GROUP
        yield Spread(f"ZeRO-3, shard_size {GROUP}", Counted(name, GROUP, size), copies)
    yield Spread("FSDP2", FullySharded(name, ranks, size))
    if ranks > GROUP:
        yield Spread(f"FSDP2, HSDP of {GROUP}", FullySharded(name, GROUP, size), copies)
    for zero, some in ((1, args.micro_batches), (0, args.micro_batches[-1:])):
        for n in some:
            what = f"{args.stages} stages, ZeRO {zero}, {n} micro-batches"
            yield Spread(what, Staged(name, ranks, size, zero, args.stages, n))


def sends(spread: Spread, kind: str) -> dict[str, object]:
    """Returns a row with the bytes that each rank sends in a step."""
    step = spread.counted.step(kind)
    calls = [(call, bucket.ranks) for bucket in step for call in bucket.calls]
    gradients = sum(sent(b.summed_by, n, b.ranks) for b in step for n in b.gradients)
    gradients += sum(
        sent(ALL_REDUCE, n // b.ranks, spread.copies) for b in step for n in b.gradients
    )
    statistics = sum(sent(ALL_REDUCE, n, b.ranks) for b in step for n in b.rounds)
    weights = sum(sent(ALL_GATHER, n, b.ranks) for b in step for n in b.published)
    if isinstance(spread.counted, FullySharded):
        ranks = spread.counted.ranks
        weights = sum(sent(call.kind, call.nbytes, ranks) for call in spread.counted.gathers)
    return {
        "spread": spread.name,
        "optimizer": kind,
        "sums of gradients": sum(len(bucket.gradients) for bucket in step),
        "buckets stepped": sum(bool(b.params if b.stepped is None else b.stepped) for b in step),
        "rounds": sum(len(bucket.rounds) for bucket in step),
        **{
            f"messages, {how}": sum(links.messages(c.kind, ranks, how) for c, ranks in calls)
            for how in links.ALGORITHMS
        },
        "gradients, GB sent": gradients / 1e9,
        "statistics, MB sent": statistics / 1e6,
        "weights, GB sent": weights / 1e9 if weights else None,
    }


def timed(spread: Spread, kind: str, given: Sequence[Given]) -> dict[str, object]:
    """Returns a row with a step's times."""
    row: dict[str, object] = {"spread": spread.name, "optimizer": kind}
    for how in given:
        found = outlook.times(spread.counted, kind, how, takes(spread, how))
        row |= {
            f"gradients, s, {how.algorithm}": found.gradients,
            f"rounds, s, {how.algorithm}": found.rounds,
            f"step, s, {how.algorithm}": found.step,
            f"rounds / step, {how.algorithm}": f"{found.rounds / found.step:.2%}",
        }
    return row


def muons(args: argparse.Namespace, given: Sequence[Given]) -> Iterator[dict[str, object]]:
    """Yields rows with what Muon sends and computes in ds_ext, in DeepSpeed and in dion."""
    model = made(args.model)[0]
    rules = memory.rules_of(OPTIMIZERS["muon"], model, {})
    matrices, others = muon_cost.divided(memory.shapes_of(model), rules)
    for ranks in args.muon_ranks:
        for bucket in sorted({args.bucket, LARGE}):
            for name, step in muon_cost.STEPS_OF.items():
                cost = step(matrices, others, ranks, bucket)
                calls = [Call("", *call) for call in cost.calls]
                yield {
                    "optimizer": name,
                    "ranks": ranks,
                    "bucket": bucket,
                    "GB sent": cost.sent(ranks) / 1e9,
                    **{
                        f"collectives, s, {how.algorithm}": sum(how.takes(c, ranks) for c in calls)
                        for how in given
                    },
                    "operations of the slowest ranks, 10¹²": cost.operations / 1e12,
                    "these, s": cost.operations / args.flops,
                }


def takes(spread: Spread, given: Given) -> Takes:
    """Returns a function from a call to its time."""
    return outlook.in_groups(given, GROUP * spread.copies) if spread.copies > 1 else given.takes


def draw(figure: "Figure", found: Sequence[Spread], given: Sequence[Given]) -> None:
    """Draws bars with the share of a step that rounds take."""
    panels = figure.subplots(1, len(given), sharey=True)
    for axes, how in zip(panels, given, strict=True):
        for i, kind in enumerate(KINDS):
            shares = []
            for spread in found:
                times = outlook.times(spread.counted, kind, how, takes(spread, how))
                shares.append(times.rounds / times.step)
            at = [y + 0.25 * (i - 1) for y in range(len(found))]
            axes.barh(at, shares, height=0.25, label=kind)
        axes.set(title=f"rounds / step, {how.algorithm}", xscale="log")
        axes.set_yticks(range(len(found)), [spread.name for spread in found])
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


TEXT = """
This report shows the bytes that the first rank sends in a step of {model} on {ranks:,} ranks. They
are counted as in [scale.md](scale.md), on tensors without storage, with the same rules, hooks and
buckets. Times come from the time model that is described there, for {link}, {tokens:,} tokens per
rank and step and {flops:g} flops per second: **assumed, not measured**. `reduce_bucket_size`, or
`bucket_size` of `fuse_into_backward`, is {bucket:,} elements. Rounds are the all-reduces of
statistics and one of the norm.

**FSDP2** is torch's own, applied to each layer and to the model, in a process group that sends
nothing. Its units, padding (a rank has whole rows, or none if there are more ranks than rows),
order of gradients and collectives are counted, not computed. The weights sent are its gathers: two
of each layer and one of the rest. As with DeepSpeed's ZeRO-3, they take no time here. A rank's own
parts fill a bucket, while with ZeRO whole gradients fill it. With more ranks there are therefore
fewer buckets and rounds. HSDP: groups of {group} ranks each hold a replica, and gradients are
all-reduced again among the replicas, as with `shard_size`.

**A pipeline** is DeepSpeed's PipelineModule, with stages of about the same number of parameters.
The largest stage is counted. Its ranks sum gradients in each micro-batch, because ds_ext keeps this
rank's part until the step. The gradients of a stage are therefore sent once per micro-batch. A
rule's sums are reduced over the ranks of a stage. One sum over all stages finds the norm and bad
gradients. All this follows the last backward pass, so none of it overlaps with backward; the same
holds for ZeRO 1's gathers of new weights. ZeRO 0 has only the one round over all stages. With the
1F1B schedule, computation takes 1 + (stages - 1) / micro-batches times as long as without stages.
Activations between stages take no time here. Tests on a small model compare the calls of FSDP2 and
of a pipeline with those of real ranks.

**Muon** has a table of its own, which is computed from the algorithms
(`ds_ext/planner/muon_cost.py`) and not counted. Tests compare its numbers for ds_ext with the
counted ones, and those for DeepSpeed with the calls of real ranks. All gradients are
included, in bf16; gathers of weights are not.

- ds_ext, ZeRO-3: one reduce-scatter of the gradients; per matrix with short side S, S(S+1)/2 fp32
  numbers all-reduced twice, or for a wide matrix the whole matrix in fp32 and S(S+1)/2 numbers.
  Ranks share the matrices of a bucket by cost. Products have two bf16 terms, so they count three
  times.
- DeepSpeed {deepspeed}, ZeRO-3: an all-reduce of the gradients, gathers of gradients and momentum,
  and gathers of updates and momentum in rounds of one matrix per rank, padded to the largest matrix
  of the round. Matrices are sorted by shape. With `zero.Init` they are not, and padding is larger.
  `sub_group_size` is not modelled.
- [microsoft/dion](https://github.com/microsoft/dion), commit 0a059a4, FSDP2: a reduce-scatter of
  the gradients, and two all-to-alls of the matrices of each shape in bf16, their number padded to a
  multiple of the ranks. It has no buckets. It runs after backward and holds all matrices that a
  rank iterates on at once.

Operations: of the slowest rank of each bucket, round or shape, added up. Dion sends and computes
least, because a matrix goes whole to one rank and its update comes back.
"""
