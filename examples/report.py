"""What the demo shows a person: what it measured, a generated text, and two pictures."""

import json
import re
from pathlib import Path

import text_data
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

GB = 1e9
DEVICE = "GPU" if torch.cuda.is_available() else "CPU"
MEMORY = "GPU memory" if torch.cuda.is_available() else "resident memory"

GREY, BLUE, ORANGE, GREEN, RED = "#c4c4c4", "#4477aa", "#ee8866", "#66aa77", "#cc3311"
# The parts of a memory bar, from left to right.
PARTS = {
    "activations, buffers, libraries": GREY,
    "weights": BLUE,
    "optimizer state": GREEN,
    "gradients": ORANGE,
}


# ------------------------------------------------------------------------------- measuring


def peak_memory() -> float:
    """The most bytes this rank has held at once: on the GPU, or else resident in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def tensor_bytes(value) -> int:
    """Bytes of all tensors in nested dicts."""
    if isinstance(value, dict):
        return sum(tensor_bytes(part) for part in value.values())
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def adamw_bytes(elements: int, dtype: str, stage: int, ranks: int) -> dict[str, float]:
    """Bytes a rank would hold with AdamW under ZeRO `stage`: arithmetic, nothing is measured.

    State is two fp32 moments and, where the weights are bf16, their fp32 copy.
    """
    width, state = (2, 12) if dtype == "bf16" else (4, 8)
    return {
        "weights": width * elements / (ranks if stage >= 3 else 1),
        "optimizer state": state * elements / (ranks if stage >= 1 else 1),
        "gradients": width * elements / (ranks if stage >= 2 else 1),
    }


def measured(trainer: Trainer, seconds: float, peak: float) -> dict:
    """What a run measured; to be called on every rank, of which the largest memory counts."""
    engine, history, args = trainer.model_wrapped, trainer.state.log_history, trainer.args
    params = list(trainer.model.parameters())
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in params)
    stage, dtype = int(engine.zero_optimization_stage()), "bf16" if args.bf16 else "fp32"
    weights = sum(getattr(p, "ds_tensor", p).nbytes for p in params)
    state = sum(tensor_bytes(s) for s in engine.optimizer.state.values())
    fused = engine.optimizer.fused
    kept = fused.kept_bytes() if fused.how.policy == "sharded" else 0
    largest = torch.tensor([peak, weights, state, kept], dtype=torch.float64, device=args.device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    peak, weights, state, kept = largest.tolist()
    return {
        "model": Path(trainer.model.name_or_path).name,
        "optimizer": type(engine.basic_optimizer).__name__,
        "stage": stage,
        "ranks": args.world_size,
        "dtype": dtype,
        "learning_rate": args.learning_rate,
        "steps": trainer.state.global_step,
        "train_loss": [(log["step"], log["loss"]) for log in history if "loss" in log],
        "held_out_loss": [(log["step"], log["eval_loss"]) for log in history if "eval_loss" in log],
        "tokens_per_second": trainer.state.num_input_tokens_seen / seconds,
        "seconds_per_step": seconds / trainer.state.global_step,
        "peak": peak,
        "held": {"weights": weights, "optimizer state": state, "gradients": kept},
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


def answer(model: Path, asked: list[dict]) -> str:
    """What the model in a folder says to `asked`: its most likely words, so always the same."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(
        text_data.prompt_text(asked, tokenizer), return_tensors="pt", add_special_tokens=False
    )
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = network.generate(**ids, max_new_tokens=48, do_sample=False)
    text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())


# --------------------------------------------------------------------------------- showing


def show(folder: Path, asked: list[dict], before: str, after: str, seconds: float) -> None:
    """Prints the outcome of the run in `folder` and draws its pictures there."""
    r = json.loads((folder / "result.json").read_text())
    first, last = r["held_out_loss"][0][1], r["held_out_loss"][-1][1]
    held, adamw = sum(r["held"].values()) / GB, sum(r["adamw_computed"].values()) / GB
    print(f"""
{title(r)}

  held-out loss  {first:.3f} before, {last:.3f} after {r["steps"]} steps
  speed          {r["tokens_per_second"]:.0f} tokens/s, {r["seconds_per_step"]:.1f} s a step, \
{seconds / 60:.1f} minutes in all
  memory         {r["peak"] / GB:.2f} GB: peak {MEMORY} of a rank, measured. {held:.2f} GB of it
                 are weights, gradients and optimizer state; AdamW would hold {adamw:.2f} GB
                 of these (computed from the number of parameters)

  asked          {asked[-1]["content"]}
  before         {before}
  after          {after}

  {folder}/  the model, in Hugging Face format
  {draw_loss(r, folder / "loss.png")}
  {draw_memory(r, folder / "memory.png")}""")


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
    for point in r["held_out_loss"]:
        axes.annotate(f"{point[1]:.2f}", point, (0, 9), textcoords="offset points", color=RED)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return path


def draw_memory(r: dict, path: Path) -> Path:
    """The peak of a rank, and what it would be with AdamW's tensors in place of ours."""
    rest = {"activations, buffers, libraries": r["peak"] - sum(r["held"].values())}
    bars = {
        f"{r['optimizer']}\n(measured)": rest | r["held"],
        "AdamW\n(computed)": rest | r["adamw_computed"],
    }
    figure, axes = canvas(r)
    left = dict.fromkeys(bars, 0.0)
    for part, colour in PARTS.items():
        widths = [bar.get(part, 0) / GB for bar in bars.values()]
        axes.barh(list(bars), widths, 0.5, list(left.values()), color=colour, label=part)
        left = {name: left[name] + width for name, width in zip(bars, widths, strict=True)}
    for row, total in enumerate(left.values()):
        axes.text(total, row, f" {total:.2f} GB", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"peak {MEMORY} of a rank, GB (AdamW: the grey part is as measured above)")
    figure.legend(ncols=4, loc="outside lower center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    return path
