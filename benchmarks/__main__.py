"""Runs one benchmark: ``python -m benchmarks step --help``. Imports only that benchmark."""

import argparse
import importlib
import os
import sys

import torch

BENCHMARKS = {
    "step": "time of the optimizers' update",
    "pairs": "time of GaLore, APOLLO and Muon beside their authors' code",
    "host": "time of the host in a step",
    "gpu": "first session on a GPU: whether it is right, its memory, its speed",
    "path": "Python functions and files that a step runs",
    "sass": "instructions of the kernels of a 7B step, without a GPU",
    "memory": "peak memory of a fine-tuning step",
    "comm": "bytes and calls of collectives",
    "train": "tokens per second of a whole step",
    "quality": "optimizers and learning rates for fine-tuning",
    "scratch": "which optimizer trains best from scratch",
    "trends": "how a step's cost grows with parameters, ranks and buckets",
}


def main(argv: list[str]) -> None:
    """Runs the benchmark named by the first argument, with the other arguments as its options."""
    listed = "\n".join(f"  {name:9}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s BENCHMARK [--help] [options]",
        description=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=BENCHMARKS, help=argparse.SUPPRESS)
    name = parser.parse_args(argv[:1]).benchmark
    if name in ("comm", "trends"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # counts do not depend on the device
    # Without an accelerator, DeepSpeed may not choose the CPU by itself.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    module = importlib.import_module(f"benchmarks.{name}")
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=str(module.__doc__).splitlines()[0]
    )
    module.add_arguments(options)
    module.main(options.parse_args(argv[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
