"""Counts the bytes that a step sends with 64 to 4,096 ranks and real shapes, and predicts its time.

counting.py runs ds_ext's code on tensors without storage. links.py has the time model. Its links,
tokens and flops are assumptions, except for gloo on this machine, which is measured.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks import links, outlook, report
from benchmarks.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Call, sent
from benchmarks.giants import MODELS, Counted, made
from benchmarks.links import RING, TREE, Link
from benchmarks.outlook import GROUP, JUDGED, SHARE, Given
from ds_ext.backward.gradient_config import BUCKET_SIZE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINKS = {
    "400 Gb/s InfiniBand": Link(5e-6, 50e9),
    "100 Gb/s Ethernet": Link(25e-6, 12.5e9),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[4**k for k in range(3, 7)])
    parser.add_argument("--bucket", type=int, default=BUCKET_SIZE, help="reduce_bucket_size")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank and step")
    parser.add_argument("--flops", type=float, default=4e14, help="flops per second of a rank")
    parser.add_argument("--latency", type=float, help="seconds per message of another link")
    parser.add_argument("--bandwidth", type=float, help="bytes per second of a rank on that link")
    parser.add_argument("--fit", nargs="+", type=int, default=[2, 3, 4], help="real ranks")
    parser.add_argument("--note", default="", help="a sentence for the report, such as the load")


# Tables.


def main(args: argparse.Namespace) -> None:
    """Fits the time model to gloo, counts all steps, and writes the tables and the plot."""
    if (args.latency is None) != (args.bandwidth is None):
        raise SystemExit("--latency and --bandwidth: give both, or neither.")
    chosen = dict(LINKS)
    if args.latency is not None:
        chosen = {"given": Link(args.latency, args.bandwidth), **chosen}
    given = {
        f"{name}, {algorithm}": Given(link, algorithm, args.tokens, args.flops)
        for name, link in chosen.items()
        for algorithm in links.ALGORITHMS
    }
    tree, ring, *_ = given.values()
    fitted = fits(args.fit, args.bucket)
    least, most = min(args.ranks), max(args.ranks)
    counted = {
        name: [Counted(name, ranks, args.bucket) for ranks in args.ranks] for name in args.models
    }
    flat = [c for of_model in counted.values() for c in of_model]
    ends = [c for c in flat if c.ranks in (least, most)]
    largest = [c for c in flat if c.ranks == most]
    tables = {
        "What a step sends, stage 3": [sends(c, kind) for c in flat for kind in ("LOMO", *JUDGED)],
        "Up to how many ranks each holds whole rows": list(whole_rows(args.models)),
        "Gloo on this machine, and the model": fitted,
        "Times of a step": [
            outlook.timed(c, kind, how) for c in ends for how in (tree, ring) for kind in JUDGED
        ],
        "From how many ranks on rounds dominate": [
            row for of_model in counted.values() for row in outlook.dominating(of_model, given)
        ],
        f"AdaLomo on {most:,} ranks, by reduce_bucket_size": [
            row for c in largest for row in outlook.by_bucket(c, tree, ring)
        ],
        f"Rounds on {most:,} ranks, by groups of ranks": [
            row for c in largest if most > GROUP for row in outlook.by_groups(c, tree, ring)
        ],
        f"The least reduce_bucket_size with which rounds do not dominate on {most:,} ranks": [
            outlook.enough(c, kind, how) for c in largest for kind in JUDGED for how in (tree, ring)
        ],
        "AdaLomo at stages 1 and 2": [
            sends(Counted(name, ranks, args.bucket, stage=2), "AdaLomo")
            for name in args.models
            for ranks in sorted({least, most})
        ],
    }
    text = TEXT.format(
        bucket=args.bucket,
        tokens=args.tokens,
        flops=args.flops,
        share=SHARE,
        group=GROUP,
        links="; ".join(
            f"{name}: {link.latency * 1e6:g} µs, {link.bandwidth / 1e9:g} GB/s"
            for name, link in chosen.items()
        ),
        first=next(iter(chosen)),
    )
    title = "A step among many ranks"
    text = f"{text.strip()}\n\n{args.note}"
    report.write("scale", title, text, tables, lambda figure: draw(figure, flat, tree, ring))


def sends(counted: Counted, kind: str) -> dict[str, object]:
    """Returns a row with the bytes that each rank sends in a step."""
    step = counted.step(kind)
    vectors = {n for n, p in made(counted.name)[0].named_parameters() if p.ndim < 2}
    calls = [(call, bucket.ranks) for bucket in step for call in bucket.calls]
    total = Counter[str]()
    for call, ranks in calls:
        total[call.kind] += sent(call.kind, call.nbytes, ranks)  # type: ignore[assignment]
    hops = {
        a: sum(links.messages(call.kind, ranks, a) for call, ranks in calls)
        for a in links.ALGORITHMS
    }
    row = {
        "model": counted.name,
        "ranks": counted.ranks,
        "optimizer": kind,
        "buckets": sum(len(bucket.gradients) for bucket in step),
        "of vectors alone": sum(all(n in vectors for n in b.params) for b in step if b.params),
        "rounds": sum(len(bucket.rounds) for bucket in step),
        "calls": len(calls),
        "longest chain": links.longest(step),
        "messages, tree": hops[TREE],
        "messages, ring": hops[RING],
        "gradients, MB sent": total[REDUCE_SCATTER] / 1e6,
        "statistics, MB sent": total[ALL_REDUCE] / 1e6,
        "statistics / gradients": f"{total[ALL_REDUCE] / total[REDUCE_SCATTER]:.3%}",
    }
    if counted.stage != 3:
        row["weights, MB sent"] = total[ALL_GATHER] / 1e6
    return row | {"state, MB": counted.state(kind) / 1e6}


def whole_rows(models: Iterable[str]) -> Iterator[dict[str, object]]:
    """Returns rows with the largest power of two of ranks that all hold whole rows."""
    for name in models:
        model, rules = made(name)
        stacks = {n: ms[0] for n, ms in rules["lomo"].matrices.items() if len(ms[0].shape) > 1}
        for matrix, count in Counter(stacks.values()).items():
            over = next(
                2**20 // world
                for n, world in MODELS[name].worlds(model, 2**20).items()
                if stacks.get(n) == matrix
            )
            holding = [2**k for k in range(21) if matrix.shard(0, 2**k).holds_rows]
            yield {
                "model": name,
                "parameter": " × ".join(map(str, matrix.stack)),
                "of these": count,
                "whole rows up to ranks": max(holding) * over,
            }


def fits(worlds: Sequence[int], bucket: int) -> list[dict[str, object]]:
    """Returns rows with gloo's constants for a number of real ranks, and the prediction errors."""
    rows: list[dict[str, object]] = []
    for ranks in worlds:
        samples = links.measure(ranks)
        link, errors = links.fit(samples)
        step = Counted("llama-70b", ranks, bucket).step("AdaLomo")
        sizes = [n for b in step for n in b.rounds]
        predicted = sum(links.seconds(Call("", ALL_REDUCE, n), ranks, link, RING) for n in sizes)
        took = links.replay(ranks, sizes)
        rows.append(
            {
                "ranks": ranks,
                "latency, µs": link.latency * 1e6,
                "bandwidth, GB/s": link.bandwidth / 1e9,
                "off by, median": f"{sorted(map(abs, errors))[len(errors) // 2]:.0%}",
                "off by, most": f"{max(map(abs, errors)):.0%}",
                "llama-70b's rounds with AdaLomo, predicted, ms": predicted * 1e3,
                "measured, ms": took * 1e3,
                "predicted / measured": predicted / took,
            }
        )
    return rows


def draw(figure: "Figure", counted: Sequence[Counted], tree: Given, ring: Given) -> None:
    """Plots statistics relative to gradients, and rounds relative to the step, over ranks."""
    left, right = figure.subplots(1, 2)
    models = list(dict.fromkeys(c.name for c in counted))
    for kind, name in zip(JUDGED, COLORS, strict=True):
        color = f"tab:{name}"
        for model, style in zip(models, STYLES, strict=False):
            own = [c for c in counted if c.name == model]
            ranks = [c.ranks for c in own]
            rows = [sends(c, kind) for c in own]
            shares = [
                row["statistics, MB sent"] / row["gradients, MB sent"]  # type: ignore[operator]
                for row in rows
            ]
            left.plot(ranks, shares, style, color=color)
        own = [c for c in counted if c.name == models[0]]
        for given, style in ((tree, "-"), (ring, ":")):
            found = [outlook.times(c, kind, given) for c in own]
            right.plot(ranks, [t.rounds / t.step for t in found], style, color=color)
        left.plot([], [], color=color, label=kind)
    for model, style in zip(models, STYLES, strict=False):
        left.plot([], [], style, color="black", label=model)
    right.plot([], [], "-", color="black", label="tree")
    right.plot([], [], ":", color="black", label="ring")
    right.axhline(SHARE, color="gray", linewidth=0.8)
    left.set(title="statistics / gradients, bytes sent")
    right.set(title=f"rounds / step, {models[0]}", ylim=(1e-3, 1))
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="ranks")
    figure.legend(loc="outside lower center", ncols=4)


COLORS = ("blue", "green", "gray", "olive", "purple", "orange", "red")
STYLES = ("-", "--", ":")
TEXT = """
This report counts the bytes that the first rank of each kind sends in a step. It runs ds_ext's code
on tensors without storage: Hugging Face's modules in the real shapes of Llama-70B and Mixtral-8x22B
(140.6B parameters), the order of gradients in their backward pass, ds_ext's hooks, buckets and
layouts, and the optimizers' rules with default settings; bf16, `reduce_bucket_size` {bucket:,}
elements. Rules can only distinguish ranks by the position of their run within a row, by its length,
and by whether it is the first run. One rank of each such kind is stepped, and the count fails if
their sums differ. Each expert is a separate matrix. "EP 8": 8 ranks share the experts of a layer.
Statistics and gradients of an expert are then summed over an eighth of the ranks, in separate
buckets.

Sent: bytes of one rank, in a ring or any algorithm that sends no more (2(d-1)/d of an all-reduce,
(d-1)/d of a reduce-scatter). Rounds: all-reduces of statistics, and one of the norm. Messages: the
sequential messages of all calls, d-1 or log2 d for a reduce-scatter and twice as many for an
all-reduce. The longest chain counts sequential collectives if gradients overlap with the rounds of
the previous bucket (gloo). On a GPU both share a stream, so the chain contains all calls. State: of
the rank with the most state, out of all ranks. DeepSpeed's gathers of weights and the exchange of
tokens between experts are not the optimizer's and are not counted.

**Times come from a model**: latency · messages + bytes / bandwidth, with the collectives in the
order in which ds_ext calls them on a GPU, sequentially and in parallel with backward. The table
below fits its constants to gloo on this machine: shortest times of all-reduces of 1 KiB to 64 MiB,
with more ranks than cores if there are two cores. The fit then predicts AdaLomo's rounds of a step
of llama-70b, which it has not seen. Everything else is **assumed, not measured**: {links} for each
rank; {tokens:,} tokens per rank and step; {flops:g} flops per second; 6 flops for each token and
used parameter. Gathers of weights take no time here, and a hop within a node takes as long as one
between nodes. Both increase the rounds' share. "Tree" and "ring" are bounds for libraries: NCCL
uses trees for small all-reduces, and rings or, since version 2.23, PAT (arXiv 2506.20252) for
reduce-scatters. PAT's latency is logarithmic too. Tables without the name of a link use {first}.

Rounds **dominate** a step if they take longer than the reduction of gradients, or more than
{share:.0%} of the step, whether they overlap with backward or not. "Not hidden" is the share of the
step that would be saved without them.

A bucket needs the same number of rounds whatever its size. A larger `reduce_bucket_size` therefore
reduces their number but needs more memory, and each parameter that is larger than a bucket still
has its own. If ranks hold whole rows, AdaLomo and Adafactor need one round instead of two, and CAME
two instead of three. ZeRO-3 keeps rows whole up to the numbers of ranks in the second table (one
parameter with split rows adds a round to its bucket). The bytes of rounds never increase with the
number of ranks. `shard_size` of the section "ds_ext" makes rounds shorter, as the table by groups
shows: groups of {group} ranks each hold a replica and sum statistics within the group, while each
run of the gradients is all-reduced again among the replicas. Its times come from the same model.
Tests on four real ranks check what it sends. DeepSpeed's hpZ
copies weights within a host, but shards states and gradients over all ranks, so it changes no
round. The order check of stage 3, 16 bytes per bucket between hosts, is not counted. A renewal of
GaLore's basis sends the whole gradient in fp32, in slices of 2^20 elements, once every
`update_proj_gap` (200) steps. [spread.md](spread.md) compares FSDP2 and pipelines with ZeRO-3.
"""
