"""What the demo shows a person: what it measured, a generated text, and two pictures."""

import gc
import json
import re
from pathlib import Path
from statistics import median

import text_data
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from ds_ext.planner.live_memory import LiveMemory

GB = 1e9
DEVICE = "GPU" if torch.cuda.is_available() else "CPU"
MEMORY = "GPU memory" if torch.cuda.is_available() else "resident memory"

GREY, BLUE, ORANGE, GREEN, RED = "#c4c4c4", "#4477aa", "#ee8866", "#66aa77", "#cc3311"
# The parts of a memory bar, from left to right.
PARTS = {
    "weights": BLUE,
    "optimizer state, buffers": GREEN,
    "only within a step": ORANGE,
    "libraries, allocator": GREY,
}


# ------------------------------------------------------------------------------- measuring


def peak_memory() -> float:
    """The most bytes this rank has held at once: on the GPU, or else resident in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


class Live:
    """Bytes of this rank's tensors that are alive: before a step, and the most within it."""

    before = most = 0

    def begin(self) -> None:
        """Begins to count, in the thread that runs the step."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        there = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        self.watch = LiveMemory(x for x in there if x.device.type == "cpu")
        self.before = self.watch.now
        self.watch.__enter__()

    def end(self) -> None:
        """Ends what has been begun, if it has."""
        if self.before and not self.most:
            if torch.cuda.is_available():
                self.most = torch.cuda.max_memory_allocated()
                return
            self.watch.__exit__(None, None, None)
            self.most = self.watch.most


def adamw_bytes(elements: int, dtype: str, stage: int, ranks: int) -> dict[str, float]:
    """Bytes a rank would hold with AdamW under ZeRO `stage`: arithmetic, nothing is measured.

    State is two fp32 moments and, where the weights are bf16, their fp32 copy; and the gradients.
    `examples/compare.py` measures it.
    """
    width, state = (2, 12) if dtype == "bf16" else (4, 8)
    return {
        "weights": width * elements / (ranks if stage >= 3 else 1),
        "optimizer state, buffers": state * elements / (ranks if stage >= 1 else 1)
        + width * elements / (ranks if stage >= 2 else 1),
    }


def measured(trainer: Trainer, seconds: list[float], live: Live, peak: float) -> dict:
    """What a run measured; to be called on every rank, of which the largest memory counts."""
    engine, history, args = trainer.model_wrapped, trainer.state.log_history, trainer.args
    params = list(trainer.model.parameters())
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in params)
    stage, dtype = int(engine.zero_optimization_stage()), "bf16" if args.bf16 else "fp32"
    weights = sum(getattr(p, "ds_tensor", p).nbytes for p in params)
    largest = torch.tensor(
        [peak, weights, live.before, live.most], dtype=torch.float64, device=args.device
    )
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    peak, weights, before, most = largest.tolist()
    return {
        "model": Path(trainer.model.name_or_path).name,
        "optimizer": type(engine.basic_optimizer).__name__,
        "stage": stage,
        "ranks": args.world_size,
        "dtype": dtype,
        "learning_rate": args.learning_rate,
        "steps": trainer.state.global_step,
        "rows": args.train_batch_size * args.world_size * args.gradient_accumulation_steps,
        "train_loss": [(log["step"], log["loss"]) for log in history if "loss" in log],
        "held_out_loss": [(log["step"], log["eval_loss"]) for log in history if "eval_loss" in log],
        "seconds": seconds,
        "held_out_rows": len(trainer.eval_dataset),
        "forward_tokens_per_second": sum(map(len, trainer.eval_dataset["input_ids"]))
        / median(log["eval_runtime"] for log in history if "eval_runtime" in log),
        "tokens_per_second": trainer.state.num_input_tokens_seen / sum(seconds),
        "peak": peak,
        "live": {
            "weights": weights,
            "optimizer state, buffers": before - weights,
            "only within a step": most - before,
        },
        "adamw_computed": adamw_bytes(elements, dtype, stage, args.world_size),
    }


def save(result: dict, folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")


# ------------------------------------------------------------------------------ generating


def question(args) -> list[dict]:
    """The messages to ask before and after: `--prompt`, or the first held-out question."""
    # Read in any case, so that data that cannot be used are found before the ranks are started.
    rows = text_data.load(args.data, args.held_out)[1]
    asked, text = text_data.question_and_answer(rows[0])
    if args.prompt:
        return [{"role": "user", "content": args.prompt}]
    return asked or [{"role": "user", "content": " ".join(text.split()[:8])}]


ANSWER = 48  # tokens at most


def answer(model: Path, asked: list[dict], streamer=None) -> str:
    """What the model in a folder says to `asked`: its most likely words, so always the same."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(
        text_data.prompt_text(asked, tokenizer), return_tensors="pt", add_special_tokens=False
    )
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = network.generate(**ids, max_new_tokens=ANSWER, do_sample=False, streamer=streamer)
    text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())


# --------------------------------------------------------------------------------- showing


def show(folder: Path, asked: list[dict], before: str, after: str, seconds: float) -> None:
    """Prints the outcome of the run in `folder` and draws its pictures there."""
    r = json.loads((folder / "result.json").read_text())
    first, last = r["held_out_loss"][0][1], r["held_out_loss"][-1][1]
    live, adamw = r["live"], sum(r["adamw_computed"].values()) / GB
    held = (live["weights"] + live["optimizer state, buffers"]) / GB
    print(f"""
{title(r)}

  held-out loss  {first:.3f} before, {last:.3f} after {r["steps"]} steps, on \
{r["held_out_rows"]} rows
  speed          {r["tokens_per_second"]:.0f} tokens/s, {sum(r["seconds"]) / r["steps"]:.1f} s a \
step, {seconds / 60:.1f} minutes in all. A forward pass
                 alone, in the evaluations, has {r["forward_tokens_per_second"]:.0f} tokens/s, \
{r["forward_tokens_per_second"] / r["tokens_per_second"]:.1f} times as many;
                 forward and backward without an optimizer take about 3 times
                 a forward pass. `make compare` measures AdamW beside it
  memory         {r["peak"] / GB:.2f} GB: peak {MEMORY} of a rank, measured. {held:.2f} GB of it
                 are held from step to step: weights, optimizer state, buffers. AdamW would
                 hold {adamw:.2f} GB of weights, state and gradients (computed from the number
                 of parameters; `make compare` measures it)

  asked          {asked[-1]["content"]}
  before         {before}
  after          {after}

  {folder}/  the model, in Hugging Face format
  {draw_loss(r, folder / "loss.png")}
  {draw_memory(r, folder / "memory.png")}""")


def show_low_memory(folder: Path, accumulated: Path) -> None:
    """Compares a batch in pieces with gradient accumulation, and draws both losses."""
    found = {
        "accumulation": json.loads((accumulated / "result.json").read_text()),
        "in pieces": json.loads((folder / "result.json").read_text()),
    }
    figure, axes = canvas(found["in pieces"])
    print(f"""
  {"":14}GB of tensors: between steps, at most   s a step   loss of each step""")
    for (name, r), style in zip(found.items(), ("-", "--"), strict=True):
        most = sum(r["live"].values()) / GB
        held = most - r["live"]["only within a step"] / GB
        losses = [loss for _, loss in r["train_loss"]]
        print(
            f"  {name:14}{held:28.2f}, {most:.2f}{median(r['seconds']):13.1f}    "
            f"{' '.join(f'{loss:.3f}' for loss in losses)}"
        )
        axes.plot(range(1, len(losses) + 1), losses, style, label=f"{name}, {most:.2f} GB")
    axes.set(xlabel="step", ylabel="loss of a batch (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(folder / "low_memory.png", dpi=150)
    print(f"  {folder / 'low_memory.png'}")


def title(r: dict) -> str:
    ranks = "1 rank" if r["ranks"] == 1 else f"{r['ranks']} ranks"
    return f"{r['model']}, {r['optimizer']}, ZeRO-{r['stage']}, {ranks}, {r['dtype']}"


def canvas(r: dict):
    """An empty figure with the run as its title; Agg draws into a file and needs no screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4), layout="constrained")
    axes.set_title(title(r), fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_loss(r: dict, path: Path) -> Path:
    """The loss of each step, and the held-out loss where it was measured."""
    figure, axes = canvas(r)
    axes.plot(*zip(*r["train_loss"], strict=True), color=BLUE, alpha=0.45, label="training batch")
    axes.plot(*zip(*r["held_out_loss"], strict=True), "o-", color=RED, label="held-out text")
    for point in (r["held_out_loss"][0], r["held_out_loss"][-1]):
        axes.annotate(f"{point[1]:.2f}", point, (0, 9), textcoords="offset points", color=RED)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path


def draw_memory(r: dict, path: Path) -> Path:
    """The peak of a rank, and what it would be with AdamW's tensors in place of ours."""
    computed = bar(r | {"live": r["live"] | r["adamw_computed"]})
    computed["libraries, allocator"] = bar(r)["libraries, allocator"]
    figure, axes = canvas(r)
    bars(axes, {f"{r['optimizer']}\n(measured)": bar(r), "AdamW\n(computed)": computed})
    axes.set_xlabel(f"peak {MEMORY} of a rank, GB (AdamW: the last two parts are as measured)")
    figure.legend(ncols=4, loc="outside lower center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    return path


def bar(r: dict) -> dict[str, float]:
    """The parts of a run's peak; resident memory may lack what no one has written to."""
    rest = max(0.0, r["peak"] - sum(r["live"].values()))
    return r["live"] | {"libraries, allocator": rest}


def bars(axes, shown: dict[str, dict[str, float]]) -> None:
    """Draws bars of bytes by part, with their sums in GB."""
    left = dict.fromkeys(shown, 0.0)
    longest = max(sum(parts.values()) for parts in shown.values()) / GB
    for part, colour in PARTS.items():
        widths = [parts[part] / GB for parts in shown.values()]
        axes.barh(list(shown), widths, 0.5, list(left.values()), color=colour, label=part)
        for row, (name, width) in enumerate(zip(shown, widths, strict=True)):
            if width > 0.06 * longest:  # there is room
                axes.text(left[name] + width / 2, row, f"{width:.2f}", ha="center", va="center")
        left = {name: left[name] + width for name, width in zip(shown, widths, strict=True)}
    for row, total in enumerate(left.values()):
        axes.text(total, row, f" {total:.2f} GB", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
