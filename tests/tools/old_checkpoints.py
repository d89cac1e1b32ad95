"""Checkpoints of each released version, in tests/data/checkpoints: later versions must load them.

    python -m tests.tools.old_checkpoints [NAME]  # writes NAME.tar.xz, by default VERSION.tar.xz
    python -m tests.tools.old_checkpoints VERSION-states

An archive has a folder for each optimizer, with the checkpoints ``zero3`` (fp32) and ``zero0``
(bf16 with masters) of DeepSpeed's engine on two ranks, and ``plain.pt``, a model's and an
optimizer's state dicts in plain PyTorch. Beside each are the weights when it was saved, and after
two further steps. 0.1.0.tar.xz was written by that version's code, with a copy of this file.
1.0.0-states.tar.xz has the ``STATES`` as the last commit of 1.0.0 saved them, without ``zero0``.
"""

import dataclasses
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

import ds_ext
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rules import REGISTRY
from tests import worlds
from tests.common import engines
from tests.common.ranks import whole

FOLDER = Path(__file__).parents[1] / "data/checkpoints"
SHAPES = {"matrix": (7, 9), "vector": (11,)}
KINDS = {"zero3": 3, "zero0": 0}  # stages of ZeRO
HYPERS = {"lr": 0.05, "rank": 3, "update_proj_gap": 2, "ns_dtype": "fp32", "relative_step": False}
STEPS, MORE = 3, 2  # before the save and after it
FP16 = {"fp16": {"enabled": True, "loss_scale": 1}}
EIGHT_BITS = {"nbits": 8, "min_8bit_size": 0}
# States that depend on settings: the optimizer, its hyper-parameters, and the engine's config.
STATES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "master24": ("adalomo", {"weight_update": "master24"}, {"bf16": {"enabled": True}}),
    "master24-fp16": ("adalomo", {"weight_update": "master24"}, FP16),
    "master-fp16": ("lion", {"weight_update": "master"}, FP16),
    "master24-flash": ("flashadamw", {"weight_update": "master24"}, {"bf16": {"enabled": True}}),
    "8-bit-adamw": ("adamw", EIGHT_BITS, {}),
    "8-bit-galore": ("galoreadamw", EIGHT_BITS, {}),
    "8-bit-lion": ("lion", {"nbits": 8}, {}),
    "8-bit-muon": ("muon", {"nbits": 8}, {}),
    "kept-projection": ("apollo", {}, {}),
    "projected": ("galoreadamw", {}, {}),
    "int8": ("lomo", {}, {"bf16": {"enabled": True}, "ds_ext": {"weight_storage": "int8"}}),
}
Weights = dict[str, Tensor]


class Whole(nn.Module):
    """Parameters whose gradients are whole numbers, the same on any number of ranks."""

    def __init__(self, seed: int = 5, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.randn(shape, generator=generator).bfloat16().float())
            )

    def forward(self, step: int) -> Tensor:
        terms = []
        for i, p in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(97 * step + i)
            g = torch.randint(-9, 9, p.shape, generator=generator).to(p.dtype)
            terms.append((p * g).sum())
        return terms[0] + terms[1]


def optimizer(rule: str, model: Whole, **own: Any) -> torch.optim.Optimizer:
    """An optimizer of the matrix by ``rule``; AdamW steps the vector if ``rule`` does not."""
    fields = {field.name for field in dataclasses.fields(REGISTRY[rule].rule)}
    hypers = {name: value for name, value in HYPERS.items() if name in fields} | own
    groups: list[dict[str, Any]] = [{"params": [model.matrix]}, {"params": [model.vector]}]
    if not getattr(REGISTRY[rule], "any_shape", True):
        groups[1]["type"] = "AdamW"
    return OPTIMIZERS[rule](groups, **hypers)


def engine(name: str, kind: str, stage: int, seed: int = 5) -> Any:
    """An engine of a rule or of one of ``STATES``; ``zero0`` has bf16 weights with masters."""
    if kind == "zero0":
        found = name, {"weight_update": "master"}, {"bf16": {"enabled": True}}
    else:
        found = STATES.get(name, (name, {}, {}))
    rule, own, extra = found
    model = Whole(seed)
    if name == "int8":
        model = Whole(seed, SHAPES | {"matrix": (256, 256)}).bfloat16()
    extra = extra | {"zero": {"stage3_param_persistence_threshold": 20}}
    made = optimizer(rule, model, **own)
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        return engines.start(model, made, stage, **extra)


def train(engine: Any, first: int, steps: int) -> Weights:
    for step in range(first, first + steps):
        engine.backward(engine(step))
        engine.step()
    return whole(engine.module)


def train_plain(model: Whole, optimizer: torch.optim.Optimizer, first: int, steps: int) -> Weights:
    for step in range(first, first + steps):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def write_on_ranks(folder: str, names: list[str], kinds: list[str]) -> None:
    """Writes the checkpoints of engines, and the weights, on all ranks."""
    for name in names:
        for kind in kinds:
            made, path = engine(name, kind, KINDS[kind]), Path(folder, name)
            saved = train(made, 0, STEPS)
            made.save_checkpoint(str(path), kind)
            found = {"saved": saved, "after": train(made, STEPS, MORE)}
            if made.global_rank == 0:
                torch.save(found, path / f"{kind}.weights.pt")


def plain(name: str, seed: int = 5) -> tuple[Whole, torch.optim.Optimizer]:
    """A model and its optimizer in plain PyTorch, of a rule or of one of ``STATES``."""
    rule, own, extra = STATES.get(name, (name, {}, {}))
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    model = Whole(seed).to(next((dtypes[key] for key in extra if key in dtypes), torch.float32))
    return model, optimizer(rule, model, **own)


def write_plain(folder: str, names: list[str]) -> None:
    for rule in names:
        model, made = plain(rule)
        saved = train_plain(model, made, 0, STEPS)
        state = {"model": model.state_dict(), "optimizer": made.state_dict()}
        torch.save(state, Path(folder, rule, "plain.pt"))
        found = {"saved": saved, "after": train_plain(model, made, STEPS, MORE)}
        torch.save(found, Path(folder, rule, "plain.weights.pt"))


Found = dict[tuple[str, str], tuple[Weights, Weights]]  # loaded and two steps later, by rule, kind


def load_on_ranks(folder: str, stages: dict[str, int]) -> Found:
    """Loads the engines' checkpoints of a version, each kind at another stage, on all ranks."""
    found: Found = {}
    for path in sorted(Path(folder).iterdir()):
        for kind in sorted(stages.keys() & {x.name for x in path.iterdir()}):
            made = engine(path.name, kind, stages[kind], seed=6)
            made.load_checkpoint(str(path), kind)
            found[path.name, kind] = whole(made.module), train(made, STEPS, MORE)
    return found


def load_plain(folder: str) -> Found:
    found: Found = {}
    for path in sorted(x.parent for x in Path(folder).glob("*/plain.pt")):
        model, made = plain(path.name, seed=6)
        state = torch.load(path / "plain.pt")
        model.load_state_dict(state["model"])
        made.load_state_dict(state["optimizer"])
        found[path.name, "plain"] = whole(model), train_plain(model, made, STEPS, MORE)
    return found


def main(name: str = ds_ext.__version__) -> None:
    """Writes an archive with this version: of all rules, or of ``STATES``."""
    with tempfile.TemporaryDirectory() as folder:
        if name.endswith("-states"):
            worlds.run(2, write_on_ranks, folder, [*STATES], ["zero3"])
            write_plain(folder, [name for name in STATES if name not in ("projected", "int8")])
        else:
            worlds.run(2, write_on_ranks, folder, [*REGISTRY], [*KINDS])
            write_plain(folder, [*REGISTRY])
        for path in Path(folder).glob("*/*.py"):  # DeepSpeed's scripts
            path.unlink()
        FOLDER.mkdir(parents=True, exist_ok=True)
        archive = FOLDER / f"{name}.tar.xz"
        with tarfile.open(archive, "w:xz", preset=9) as file:
            for path in sorted(Path(folder).iterdir()):
                file.add(path, path.name)
        print(archive, archive.stat().st_size, "bytes")


if __name__ == "__main__":
    from tests.tools import old_checkpoints  # ranks import the jobs from there

    old_checkpoints.main(*sys.argv[1:])
