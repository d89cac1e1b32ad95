"""Fine-tune a language model with a ds_ext optimizer under DeepSpeed ZeRO, with the HF Trainer.

    python examples/finetune.py
    python examples/finetune.py --optimizer came --model DIR --data mine.jsonl --steps 500
    python examples/finetune.py --low-memory

The first line trains SmolLM2-135M-Instruct to answer like The Devil's Dictionary, offline. The last
one trains it with batches of 32 in pieces, and again with gradient accumulation to compare. Started
plainly, the script starts itself again as `--ranks` processes; under torchrun it is one of them.
All that ds_ext asks of a training script is in `train`: one import and a DeepSpeed configuration.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import datasets
import report
import text_data
import torch
import transformers
from progress import Progress, Words, phase
from smollm2 import smollm2
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from turns import Turns

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data"
GPU = torch.cuda.is_available()
PIECES = 8  # of --low-memory
ACCUMULATED = "accumulated"  # folder of its run with gradient accumulation


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a language model with a ds_ext optimizer under DeepSpeed ZeRO."
    )
    add = parser.add_argument
    add("--optimizer", default="adalomo", help="NAME of configs/NAME_zero3.json, or a JSON file")
    add("--stage", type=int, choices=range(4), help="ZeRO stage (default: the configuration's)")
    add("--ranks", type=int, default=1 if GPU else 2, help="processes (default: 1 GPU, or 2 CPUs)")
    add("--steps", type=int, help="default: 40, or 6 with --low-memory")
    add("--batch", type=int, help="sequences a step, over all ranks (default: 4, or 32)")
    add("--accumulation", type=int, default=1, help="micro-batches a step; gradients are kept")
    add("--batch-splits", type=int, default=1, help="pieces of a layer's batch; loss in chunks")
    add("--low-memory", action="store_true", help=f"--batch-splits {PIECES}, and accumulation too")
    add("--max-length", type=int, default=128, help="tokens of a sequence (default: 128)")
    add("--lr", type=float, help="peak learning rate (default: one that suits the optimizer)")
    add("--weight-decay", type=float, default=0.0)
    # AdaLomo's authors do not clip: it bounds the RMS of each update itself.
    add("--max-grad-norm", type=float, default=0.0, help="clip to it, exactly (default: 0, do not)")
    add("--evaluations", type=int, help="of the held-out loss (default: one every 5 steps)")
    add("--held-out-rows", type=int, default=16, help="for it (default: 16; 0: all there are)")
    add("--dtype", choices=("fp32", "bf16"), default="bf16" if GPU else "fp32")
    add("--model", help="Hugging Face model folder (default: SmolLM2-135M-Instruct)")
    add("--data", help=f"file that ends in {', '.join(text_data.KINDS)} (default: the Devil's)")
    add("--held-out", help="such a file to measure the loss on (default: a tenth of --data)")
    add("--prompt", help="what to ask before and after (default: the first held-out question)")
    add("--out", type=Path, help="folder of model and pictures (default: runs/OPTIMIZER)")
    add("--turns", help=argparse.SUPPRESS)  # compare.py's: where to wait for the other run
    args = parser.parse_args()
    pieces = PIECES if args.low_memory else args.accumulation * args.batch_splits
    args.steps = args.steps or (6 if args.low_memory else 40)
    args.batch = args.batch or (4 * PIECES if args.low_memory else 4)
    if args.ranks * pieces < 1 or args.batch % (args.ranks * pieces):
        parser.error(
            f"--batch {args.batch} must be a multiple of --ranks {args.ranks} times the {pieces} "
            "micro-batches or pieces of a step"
        )
    if args.dtype == "bf16" and not GPU and not torch.cpu._is_avx512_bf16_supported():
        parser.error("--dtype bf16 needs a GPU, or a CPU with AVX512-BF16: choose fp32")
    fill_in(args)
    return args


def fill_in(args: argparse.Namespace) -> None:
    """Sets the options whose defaults depend on others or on files."""
    if args.data is None:
        args.data = str(DATA / "devil_train.jsonl")
        args.held_out = args.held_out or str(DATA / "devil_test.jsonl")
        args.prompt = args.prompt or 'Define the word "politician".'
    args.config = config_file(args.optimizer)
    args.optimizer = args.config.stem.removesuffix("_zero3")
    args.lr = args.lr or rate_of(json.loads(args.config.read_text()))
    args.out = args.out or Path("runs") / args.optimizer
    args.model = Path(args.model or smollm2(Path("runs/cache")))


def config_file(optimizer: str) -> Path:
    """The DeepSpeed configuration that `--optimizer` names."""
    known = {path.stem.removesuffix("_zero3"): path for path in ROOT.glob("configs/*_zero3.json")}
    path = known.get(optimizer.lower(), Path(optimizer))
    if not path.is_file():
        raise SystemExit(f"--optimizer {optimizer}: not a file, nor one of {', '.join(known)}")
    return path


def rate_of(config: dict) -> float:
    """The rate to start at of the optimizer that a DeepSpeed configuration names, or AdamW's."""
    from ds_ext.rates import RATES

    kind = config.get("optimizer", {}).get("type", "").lower().removeprefix("ds_ext.")
    return RATES.get(kind.replace("-", ""), RATES["adamw"]).start


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    config = json.loads(args.config.read_text())
    if args.stage is not None:
        config["zero_optimization"]["stage"] = args.stage
    if args.batch_splits > 1:
        config["ds_ext"] = dict.fromkeys(("batch_splits", "chunked_loss"), args.batch_splits)
    batch = args.batch // (args.ranks * args.accumulation)
    return TrainingArguments(
        output_dir=str(args.out),
        deepspeed=config,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch // args.batch_splits,
        gradient_accumulation_steps=args.accumulation,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=min(5, args.steps // 2),
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        bf16=args.dtype == "bf16",
        use_cpu=not GPU,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=max(1, args.steps // args.evaluations) if args.evaluations else 5,
        prediction_loss_only=True,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",
        save_strategy="no",
        report_to="none",
        log_level="error",
        disable_tqdm=True,  # `Progress` draws the bars
        dataloader_pin_memory=GPU,
    )


def train(args: argparse.Namespace) -> None:
    """Trains as one of the ranks; rank 0 writes the model and what the report needs."""
    import deepspeed

    import ds_ext  # noqa: F401  makes the optimizers known to DeepSpeed

    if not GPU:  # a faster transport, perhaps, but it is compiled for half a minute at first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    # Before the model: once a ZeRO-3 configuration is in force, each rank keeps only its part.
    arguments = training_arguments(args)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    with arguments.main_process_first():  # the others find its result in the cache of `datasets`
        training, held_out = (
            text_data.tokenize(rows, tokenizer, args.max_length)
            for rows in text_data.load(args.data, args.held_out)
        )

    held_out = spread(held_out, args.held_out_rows)
    progress = Progress(len(held_out), tells_phases=not args.turns)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=training,
        eval_dataset=held_out,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        callbacks=[Turns(args.turns), progress] if args.turns else [progress],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    peak = report.peak_memory()
    if trainer.is_world_process_zero() and not args.turns:
        phase(4, f"Saving the model to {args.out}")
    trainer.save_model()
    result = report.measured(trainer, progress.seconds, progress.live, peak)
    if trainer.is_world_process_zero():
        report.save(result, args.out)


def spread(rows: datasets.Dataset, most: int) -> datasets.Dataset:
    """At most so many rows, evenly spaced; all of them if `most` is 0."""
    every = max(1, len(rows) // most) if most else 1
    return rows.select(range(0, len(rows), every)[: most or None])


def runs(args: argparse.Namespace) -> list[list[str]]:
    """The options of each run, the one that leaves the model last."""
    given = [option for option in sys.argv[1:] if option != "--low-memory"]
    if not args.low_memory:
        return [given]
    given += [f"--batch={args.batch}", f"--steps={args.steps}"]
    accumulated = [f"--accumulation={PIECES}", f"--out={args.out / ACCUMULATED}"]
    return [given + accumulated, [*given, f"--batch-splits={PIECES}", f"--out={args.out}"]]


def start(options: list[str], ranks: int) -> subprocess.Popen:
    """Starts this script with `options` as `ranks` processes."""
    environment = os.environ.copy()
    cores = os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # ranks share cores: do not spin
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc_per_node={ranks}", __file__, *options]
    return subprocess.Popen(command, env=environment)


def be_quiet() -> None:
    """Leaves the terminal to the progress bar and to what ds_ext has to say."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # torch's new names for collectives; DeepSpeed uses those that all its torch versions have.
    warnings.filterwarnings("ignore", "`torch.distributed.*deprecated", FutureWarning)


def main() -> None:
    if not GPU:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before anything imports DeepSpeed
    be_quiet()
    args = options()
    if "RANK" in os.environ:
        return train(args)
    began = time.perf_counter()
    print(
        f"Training {args.model.name} with {args.config.name} on {args.ranks} rank(s): "
        f"{args.steps} steps of {args.batch} sequences, {args.dtype}, on the {report.DEVICE}"
    )
    phase(1, "Asking the model before training")
    question = report.question(args)
    before = report.answer(args.model, question, Words(report.ANSWER))
    phase(2, f"Starting {args.ranks} rank(s); the first time, native code is compiled")
    for given in runs(args):
        if code := start(given, args.ranks).wait():
            raise SystemExit(code)
    phase(5, "Asking the model after training, and drawing")
    after = report.answer(args.out, question, Words(report.ANSWER))
    report.show(args.out, question, before, after, time.perf_counter() - began)
    if args.low_memory:
        report.show_low_memory(args.out, args.out / ACCUMULATED)


if __name__ == "__main__":
    main()
