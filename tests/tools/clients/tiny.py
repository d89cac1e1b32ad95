"""What the scripts share: a tiny random Llama, its tokenizer, data, a config, the result.

It is imported inside the clients' environments, so it needs nothing but transformers and ds_ext.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

import ds_ext

STEPS = 15
RATE = 1e-2  # of a model that knows nothing
SPECIAL = ["<pad>", "<end>"]
CHAT = "{% for message in messages %}{{ message['content'] }}<end>{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(SPECIAL + alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", chat_template=CHAT
    )


def llama() -> LlamaForCausalLM:
    """Returns a Llama of two layers, with the same random weights on every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(SPECIAL) + 256, "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=256))


def save(folder: Path) -> None:
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def rows(count: int = 256) -> list[dict[str, str]]:
    """Returns sums in words: "prompt" and "completion"."""
    return [
        {"prompt": f"What is {i % 16} plus {i // 16}?", "completion": f" It is {i % 16 + i // 16}."}
        for i in range(count)
    ]


def config(stage: int) -> dict:
    """Returns the DeepSpeed config that ``python -m ds_ext config adalomo`` writes."""
    command = [sys.executable, "-m", "ds_ext", "config", "adalomo", "--stage", str(stage)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def logged(history: list[dict]) -> list[float]:
    """Returns the losses of a Trainer's ``log_history``."""
    return [entry["loss"] for entry in history if "loss" in entry]


def saved(folder: Path) -> list[float]:
    """Returns the losses of the newest trainer_state.json in the folder of a run."""
    newest = max(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return logged(json.loads(newest.read_text())["log_history"])


def result(losses: list[float], ranks: int, stage: int | str) -> None:
    """Prints the result: means of the first and of the last three losses."""
    ends = [sum(part) / len(part) for part in (losses[:3], losses[-3:])]
    print("RESULT " + json.dumps({"losses": ends, "ranks": ranks, "stage": stage}), flush=True)


def arguments() -> dict:
    made = {"output_dir": "out", "max_steps": STEPS, "per_device_train_batch_size": 8}
    made |= {"learning_rate": RATE, "lr_scheduler_type": "constant"}
    made |= {"max_grad_norm": 0.0}  # AdaLomo bounds its updates itself
    made |= {"bf16": False, "use_cpu": True, "logging_steps": 1}
    return made | {"save_strategy": "no", "report_to": "none"}


def check(engine: DeepSpeedEngine, stage: int) -> None:
    """Raises AssertionError unless AdaLomo trains the engine at the stage."""
    assert engine.zero_optimization_stage() == stage
    assert isinstance(engine.optimizer.optimizer, ds_ext.AdaLomo), engine.optimizer


def finish(trainer: Trainer, stage: int) -> None:
    """Prints the result of a Trainer under DeepSpeed, on one rank."""
    check(trainer.model_wrapped, stage)
    if dist.get_rank() == 0:
        result(logged(trainer.state.log_history), dist.get_world_size(), stage)
