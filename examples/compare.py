"""Fine-tune as finetune.py does, with AdamW as DeepSpeed has it and with a ds_ext optimizer.

    python examples/compare.py
    python examples/compare.py --optimizer came --steps 100 --dtype fp32

Both runs have the same ranks, batches, seed and schedule, each its own learning rate, and take
their steps in turns, so that seconds are of the same machine at the same time. A picture shows loss
against steps, loss against seconds, and memory; all of it measured. Options are finetune.py's.
"""

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from statistics import median

import finetune
import report
import torch
import turns

sys.path.append(str(finetune.ROOT))

from benchmarks.report import machine  # noqa: E402

ADAMW = finetune.ROOT / "examples" / "deepspeed_adamw.json"
NAMES = ("AdamW in DeepSpeed", "ds_ext {}")
COLOURS = (report.RED, report.BLUE)
LINES = "-", "--"


def options() -> tuple[argparse.Namespace, list[str]]:
    """What is for both runs, and what finetune.py is to be given further."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__.split("\n")[0],
        epilog="Other options are finetune.py's, and are given to both runs.",
    )
    add = parser.add_argument
    bf16 = finetune.GPU or torch.cpu._is_avx512_bf16_supported()
    add("--optimizer", default="adalomo", help="beside AdamW (default: adalomo)")
    add("--ranks", type=int, default=1 if finetune.GPU else 2)
    add("--steps", type=int, default=60)
    add("--evaluations", type=int, default=4, help="of the held-out loss, beside the first")
    add("--dtype", choices=("fp32", "bf16"), default="bf16" if bf16 else "fp32")
    add("--lr", type=float, help="of --optimizer (default: finetune.py's)")
    add("--adamw-lr", type=float, help="of AdamW (default: finetune.py's)")
    add("--out", type=Path, default=Path("runs/compare"), help="folder of the picture")
    add("--draw", type=Path, help="draw again what such a run has left: OUT/compare.json")
    return parser.parse_known_args()


def train(args: argparse.Namespace, further: list[str]) -> list[dict]:
    """Results of both runs, AdamW's first."""
    if "--model" not in " ".join(further):
        finetune.smollm2(Path("runs/cache"))  # unpacked once, not by each of both
    shared = ["ranks", "steps", "evaluations", "dtype"]
    both = [f"--{name}={getattr(args, name)}" for name in shared]
    both += ["--held-out-rows=0", *further]
    store = turns.serve()
    folders = [args.out / Path(name).stem for name in (ADAMW, args.optimizer)]
    rates = [args.adamw_lr, args.lr]
    runs = []
    for run, optimizer in enumerate((str(ADAMW), args.optimizer)):
        own = [f"--optimizer={optimizer}", f"--out={folders[run]}", f"--turns={store.port},{run}"]
        own += [f"--lr={rates[run]}"] if rates[run] else []
        runs.append(finetune.start(own + both, args.ranks))
    try:
        while any(run.poll() is None for run in runs) and not any(run.poll() for run in runs):
            time.sleep(0.2)
        if code := next(filter(None, (run.poll() for run in runs)), 0):
            raise SystemExit(code)
    finally:
        for run in runs:
            run.terminate()
            run.wait()
    return [json.loads((folder / "result.json").read_text()) for folder in folders]


def row(name: str, r: dict) -> str:
    """A line of the table."""
    live = sum(r["live"].values())
    held = live - r["live"]["only within a step"]
    (_, first), *_, (_, last) = r["held_out_loss"]
    quick, middle, slow = spread(r["seconds"])
    return (
        f"  {name:20}{r['learning_rate']:<8.0e}{first:.3f} -> {last:.3f}    "
        f"{middle:.2f} ({quick:.2f} to {slow:.2f})     "
        f"{held / report.GB:.2f}, {live / report.GB:.2f}, {r['peak'] / report.GB:.2f}"
    )


def spread(seconds: list[float]) -> tuple[float, float, float]:
    """Those that a tenth of the steps stay below, the median, and those a tenth go beyond."""
    ordered = sorted(seconds)
    tenth = len(ordered) // 10
    return ordered[tenth], median(ordered), ordered[-1 - tenth]


def show(found: dict, folder: Path) -> None:
    """Prints the table and draws the picture."""
    named = {name.format(r["optimizer"]): r for name, r in zip(NAMES, found["runs"], strict=True)}
    print(f"""
{setting(found)}

  {"":20}{"rate":8}held-out loss     seconds a step          GB: held, live, resident
{chr(10).join(row(*item) for item in named.items())}

  Held: tensors between steps. Live: the most within one step. Resident: the most of a rank's
  memory, libraries included. Seconds: median, and what 8 of 10 steps lie between.
  {found["machine"]}
  {draw(named, found, folder / "compare.png")}""")


def setting(found: dict) -> str:
    r = found["runs"][1]
    ranks = "1 rank" if r["ranks"] == 1 else f"{r['ranks']} ranks"
    return (
        f"{r['model']} on {found['data']}: {r['steps']} steps of {r['rows']} rows, "
        f"{r['dtype']}, ZeRO-{r['stage']}, {ranks}"
    )


def draw(named: dict[str, dict], found: dict, path: Path) -> Path:
    """Loss against steps and seconds, and memory, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, 3, figsize=(14, 4.6), layout="constrained", width_ratios=(1, 1, 1.25)
    )
    figure.suptitle(setting(found), fontsize=12)
    by_step, by_second, memory = panels
    for (name, r), colour, line in zip(named.items(), COLOURS, LINES, strict=True):
        ends = [sum(r["seconds"][:step]) for step in range(r["steps"] + 1)]
        held_out = r["held_out_loss"]
        for axes, at in ((by_step, range(r["steps"] + 1)), (by_second, ends)):
            steps, losses = zip(*r["train_loss"], strict=True)
            axes.plot([at[s] for s in steps], losses, line, color=colour, alpha=0.3)
            steps, losses = zip(*held_out, strict=True)
            axes.plot([at[s] for s in steps], losses, "o-", color=colour)
        rate, (quick, middle, slow) = r["learning_rate"], spread(r["seconds"])
        by_step.lines[-1].set_label(f"{name}, lr {rate:g}: {losses[-1]:.3f}")
        by_second.lines[-1].set_label(f"{name}: {middle:.1f} s a step ({quick:.1f}–{slow:.1f})")
    by_step.set(xlabel="step", ylabel="loss, nats a token", title="Loss against steps")
    by_step.legend(frameon=False, fontsize=8, title="held-out loss (pale: training batches)")
    by_second.set(xlabel="seconds of training steps", title="Loss against seconds")
    by_second.legend(frameon=False, fontsize=8)
    report.bars(memory, {name.replace(" ", "\n", 1): report.bar(r) for name, r in named.items()})
    live = " and ".join(f"{sum(r['live'].values()) / report.GB:.2f}" for r in found["runs"])
    memory.set(
        xlabel=f"GB (coloured: tensors alive, {live})",
        title=f"Peak {report.MEMORY} of a rank, measured",
    )
    memory.legend(frameon=False, loc="center right", fontsize=8)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, -0.03, f"{found['machine']}\n{found['how']}", fontsize=8, va="top")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    return path


def main() -> None:
    args, further = options()
    if args.draw:
        return show(json.loads(args.draw.read_text()), args.draw.parent)
    began = time.perf_counter()
    runs = train(args, further)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))  # as finetune's have
    data = "other data" if "--data" in " ".join(further) else "The Devil's Dictionary"
    minutes = (time.perf_counter() - began) / 60
    given = f' ARGS="{shlex.join(sys.argv[1:])}"' if sys.argv[1:] else ""
    how = (
        f"make compare{given}; one run of each, steps in turns, {minutes:.0f} minutes in all; "
        f"load {os.getloadavg()[2]:.1f}, of which the runs are {args.ranks}"
    )
    found = {"machine": machine(), "how": how, "data": data, "runs": runs}
    (args.out / "compare.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found, args.out)


if __name__ == "__main__":
    main()
