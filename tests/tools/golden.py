"""Golden curves: losses of 50 steps of a small Llama on real text, recorded in tests/data/golden.

    python -m tests.tools.golden             # writes them anew
    python -m tests.tools.golden came lomo   # those of two optimizers

There is a file for each optimizer, with a line for each of plain PyTorch, ZeRO-3 and FSDP2 (the
latter on two ranks) in fp32 and bf16. Its first line names the machine that wrote it. On such a
machine the losses are equal bit by bit, elsewhere to a tolerance (test_golden.py). A change that
moves them is noted in CHANGELOG.md.
"""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common import by_role, engines
from tests.common.hypers import TRAINED, changed

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/data/golden"
TEXT = ROOT / "examples/data/devil_train.jsonl"
STEPS, ROWS, LENGTH, VOCAB = 50, 4, 32, 128  # rows of all ranks together
WAYS = ("plain", "zero3", "fsdp2")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HYPERS = changed(TRAINED, galoreadamw={"update_proj_gap": 20}, apollo={"update_proj_gap": 20})

Curves = dict[str, list[str]]  # 50 losses, as the shortest text of each fp32 number, by "way dtype"


def machine() -> str:
    """What decides the last bits of a loss: the processor, and the versions of packages."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    told = [line.partition(":")[::2] for line in cpu.split("\n\n")[0].splitlines()]
    facts = {key.strip(): value.strip() for key, value in told}
    flags = [f for f in facts.get("flags", "").split() if f.startswith(("avx", "fma", "amx"))]
    names = [facts.get(key, "") for key in ("vendor_id", "cpu family", "model", "cache size")]
    packages = [f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers")]
    capability = torch.backends.cpu.get_cpu_capability()
    return "; ".join([*packages, platform.machine(), *names, capability, " ".join(sorted(flags))])


def batches() -> Tensor:
    """The text's first bytes as tokens -> [steps, rows, length]."""
    entries = [json.loads(line) for line in TEXT.read_text().splitlines()]
    text = "\n".join(f"{entry['instruction']} {entry['output']}" for entry in entries)
    tokens = [min(ord(letter), VOCAB - 1) for letter in text[: STEPS * ROWS * LENGTH]]
    return torch.tensor(tokens).view(STEPS, ROWS, LENGTH)


def llama(dtype: str) -> nn.Module:
    """A Llama of one layer; its weights are the same in every process."""
    torch.manual_seed(7)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers, use_cache=False))
    return model.to(DTYPES[dtype])


def curve(rule: str, way: str, dtype: str, steps: int) -> list[str]:
    """Trains -> the mean loss over all ranks before each step."""
    model = llama(dtype)
    if way == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    optimizer = by_role.made(rule, model, HYPERS[rule])
    zero = {"stage3_param_persistence_threshold": 50, "reduce_bucket_size": 4000}
    more = {"zero": zero, "bf16": {"enabled": dtype == "bf16"}}
    engine = engines.start(model, optimizer, 3 if way == "zero3" else None, **more)
    losses = []
    for rows in batches()[:steps]:
        if way != "plain":
            rows = rows.chunk(dist.get_world_size())[dist.get_rank()]
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    found = torch.stack(losses)
    if way != "plain":
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return [str(loss) for loss in found.numpy()]


def on_ranks(rules: list[str], ways: tuple[str, ...], steps: int) -> dict[str, Curves]:
    return {r: {f"{w} {d}": curve(r, w, d, steps) for w in ways for d in DTYPES} for r in rules}


def measured(rules: list[str], steps: int = STEPS) -> dict[str, Curves]:
    one = worlds.run(1, on_ranks, rules, WAYS[:1], steps, limit=1200)[0]
    two = worlds.run(2, on_ranks, rules, WAYS[1:], steps, limit=1200)[0]
    return {rule: one[rule] | two[rule] for rule in rules}


def recorded(rule: str) -> tuple[str, Curves]:
    """What the file of a rule says: the machine, and the curves."""
    first, *lines = (FOLDER / f"{rule}.txt").read_text().splitlines()
    named = (line.partition(": ")[::2] for line in lines)
    return first.removeprefix("# "), {name: losses.split() for name, losses in named}


def values(losses: list[str]) -> Any:
    return np.array(losses, dtype=np.float32)


def main(rules: list[str]) -> None:
    """Writes the files of the rules, by default of all."""
    for rule, curves in measured(rules or list(REGISTRY)).items():
        lines = [f"# {machine()}", *(f"{name}: {' '.join(c)}" for name, c in curves.items())]
        (FOLDER / f"{rule}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    from tests.tools import golden  # ranks import the jobs from there

    golden.main(sys.argv[1:])
