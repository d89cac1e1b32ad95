"""What the small examples share: their options, and a model that needs no download.

    python examples/tiny.py

writes that model to runs/cache/tiny-llama and questions and answers, as TRL wants them, to
runs/cache/tiny-data: something to try TRL's own commands with.

The model is a Llama of a million weights that knows nothing, with a tokenizer made of the text of
examples/data. It is written once, in seconds, as a Hugging Face model folder.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ds_ext.rates import RATES

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data" / "devil_train.jsonl"
CONFIG = ROOT / "configs" / "adalomo_zero3.json"
GPU = torch.cuda.is_available()
TRAINED = f"of a tiny untrained model; of one that is trained {RATES['adalomo'].start:g}"


def parser(description: str, steps: int, lr: float = 1e-2) -> argparse.ArgumentParser:
    """The options of an example, whose run is ``steps`` long."""
    made = argparse.ArgumentParser(description=description.split("\n")[0])
    made.add_argument("--model", help="Hugging Face model folder (default: a tiny Llama)")
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--lr", type=float, default=lr, help=TRAINED)
    made.add_argument("--out", default=f"runs/{Path(made.prog).stem}", help="folder to write to")
    made.add_argument("--local_rank", help=argparse.SUPPRESS)  # the launcher `deepspeed` adds it
    return made


def options(description: str, steps: int, lr: float = 1e-2) -> argparse.Namespace:
    """The options of the command line; call it before a DeepSpeed config is in force."""
    return with_model(parser(description, steps, lr).parse_args())


def with_model(given: argparse.Namespace) -> argparse.Namespace:
    """Options whose ``model`` is a folder."""
    given.model = given.model or str(tiny_llama(Path("runs/cache")))
    return given


def rows() -> list[dict[str, str]]:
    """Questions (``instruction``) and answers (``output``) of The Devil's Dictionary."""
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def tiny_llama(cache: Path) -> Path:
    """The folder of the model; the first process of a machine makes it, the others wait for it."""
    folder = cache / "tiny-llama"
    if not folder.exists() and os.environ.get("LOCAL_RANK", "0") == "0":
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        make(partial)
        partial.rename(folder)  # under its name only when whole
    while not folder.exists():
        time.sleep(0.2)
    return folder


def make(folder: Path) -> None:
    """Writes the model and its tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in rows() for text in row.values()), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    )
    wrapped.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(wrapped),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            pad_token_id=wrapped.pad_token_id,
            bos_token_id=None,
            eos_token_id=wrapped.eos_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(folder)


def pairs() -> list[dict[str, str]]:
    """The rows as TRL has them: a prompt, and the completion that is learnt."""
    return [{"prompt": row["instruction"], "completion": " " + row["output"]} for row in rows()]


def main() -> None:
    """Writes the model and the data."""
    cache = Path("runs/cache")
    data = cache / "tiny-data" / "train.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    print(f"model: {tiny_llama(cache)}\ndata: {data.parent}")


if __name__ == "__main__":
    main()
