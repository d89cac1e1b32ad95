"""TRL's trainers that generate between steps, on two ranks, against one process with the authors'
optimizers: the same completions are sampled, and the weights become the same."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, TrainerCallback

from tests import worlds
from tests.common import authors
from tests.common.choose import params
from tests.common.plain import weights
from tests.common.ranks import whole
from tests.integration import trainer_jobs
from tests.integration.test_trainer import compare, of, split
from tests.integration.trainer_jobs import config, load
from tests.tools.support import of as of_table

PROMPTS, GROUP, TOKENS, STEPS = 2, 4, 6, 3  # a step, completions of each, their length; steps
WORDS = [f"w{i}" for i in range(63)]


@dataclass(frozen=True)
class Job:
    trainer: str
    rule: str
    stage: int
    lr: float
    arguments: dict[str, Any] = field(default_factory=dict)
    lora: bool = False


CLIPPED = {"max_grad_norm": 0.3}
BY_LAYER = {"ds3_gather_for_generation": False}  # generation gathers each module when it is used
BESIDE_REFERENCE = {"beta": 0.1}  # a second model, which another engine partitions
TWICE = {"gradient_accumulation_steps": 2}
JOBS = {
    "grpo-3": Job("GRPO", "adalomo", 3, 1e-2),
    "grpo-2": Job("GRPO", "adalomo", 2, 1e-2),
    "grpo-3-by-layer": Job("GRPO", "adalomo", 3, 1e-2, BY_LAYER | BESIDE_REFERENCE),
    "grpo-3-both": Job("GRPO", "came", 3, 1e-3, CLIPPED | TWICE),
    "grpo-3-lora": Job("GRPO", "lomo", 3, 0.1, CLIPPED, lora=True),
    "rloo-3": Job("RLOO", "came", 3, 1e-3, BESIDE_REFERENCE),
    "rloo-2": Job("RLOO", "lomo", 2, 0.1),
    "online-dpo-3": Job("OnlineDPO", "lomo", 3, 0.1),
    "online-dpo-2": Job("OnlineDPO", "adalomo", 2, 1e-2),
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<pad>", "<end>", "<unknown>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def prompts() -> Dataset:
    rows = [" ".join(WORDS[(7 * i + 5 * j) % 63] for j in range(3)) for i in range(12)]
    return Dataset.from_dict({"prompt": rows})


class Draws:
    """``torch.multinomial`` for the given ones of all ranks' rows, by a generator of each call."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.calls = 0

    def __call__(self, probabilities: Tensor, num_samples: int = 1, **_: Any) -> Tensor:
        assert probabilities.shape[0] == len(self.rows) and num_samples == 1
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        drawn = torch.rand(PROMPTS * GROUP, 1, generator=generator, dtype=torch.float64)
        return torch.searchsorted(probabilities.double().cumsum(-1), drawn[self.rows]).clamp_max(65)


def rows_of(kind: str, rank: int, ranks: int) -> list[int]:
    total = PROMPTS * GROUP
    if kind != "OnlineDPO":
        return list(range(rank * total // ranks, (rank + 1) * total // ranks))
    half = total // 2  # first all prompts' one completion, then the other
    mine = range(rank * half // ranks, (rank + 1) * half // ranks)
    return [*mine, *(half + i for i in mine)]


class Watch(TrainerCallback):
    """Rewards completions, and notes what a rank holds when it does, and after each step.

    That is elements of whole weights, but for the small ones that ZeRO-3 never partitions.
    """

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.held: list[int] = []

    def reward(self, completions: list[str], **_: Any) -> list[float]:
        """How many words of even number a completion has, and a little of what they are."""
        self._look()
        numbers = [[WORDS.index(w) for w in text.split() if w in WORDS] for text in completions]
        return [sum(n % 2 == 0 for n in ns) + sum(ns) / 200 for ns in numbers]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._look()

    def _look(self) -> None:
        ours = [p for p in self.params if hasattr(p, "ds_persist")]
        assert all(p.grad is None for p in ours)
        self.held.append(sum(p.numel() for p in ours if not p.ds_persist))


def classes(kind: str) -> tuple[Any, Any]:
    import trl  # where it is needed alone: it asks for Python 3.11

    if kind == "OnlineDPO":
        from trl.experimental import online_dpo as trl  # type: ignore[no-redef]
    return getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")


def make(job: Job, folder: str, watch: Watch, ranks: int = 1, **more: Any) -> Any:
    """A trainer of ``ranks`` ranks; ``more`` of its arguments and settings."""
    trainer_class, config_class = classes(job.trainer)
    is_dpo = job.trainer == "OnlineDPO"
    lengths = {"max_new_tokens": TOKENS, "max_length": 64}
    groups = {"max_completion_length": TOKENS, "num_generations": GROUP, "shuffle_dataset": False}
    settings = trainer_jobs.ARGUMENTS | {
        "output_dir": f"{folder}/out",
        "generation_kwargs": {"min_new_tokens": TOKENS},
        **{"learning_rate": job.lr, "max_steps": STEPS, "max_grad_norm": 0.0},
        **{"temperature": 1.0, "bf16": False},
        **(lengths if is_dpo else groups),
        **job.arguments,
        **more.pop("settings", {}),
    }
    rows = PROMPTS * GROUP // (2 if is_dpo else 1)
    batch = rows // (ranks * settings.get("gradient_accumulation_steps", 1))
    if is_dpo:
        more["ref_model"] = load(folder)
    return trainer_class(
        reward_funcs=watch.reward,
        args=config_class(per_device_train_batch_size=batch, **settings),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        **more,
    )


@contextlib.contextmanager
def drawn(kind: str, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    with mock.patch.object(torch, "multinomial", Draws(rows_of(kind, rank, ranks))):
        yield


def model(job: Job, folder: str) -> nn.Module:
    made = load(folder)
    return trainer_jobs.adapted(made) if job.lora else made


def train(folder: str, name: str) -> dict[str, Any]:
    job, rank, ranks = JOBS[name], dist.get_rank(), dist.get_world_size()
    settings = {"deepspeed": config(job.rule, job.stage)}
    with drawn(job.trainer, rank, ranks):
        trained = model(job, folder)
        watch = Watch(trained)
        trainer = make(
            job, folder, watch, ranks, model=trained, callbacks=[watch], settings=settings
        )
        trainer.train()
    return {
        "after": whole(trainer.model_wrapped.module),
        "log": trainer.state.log_history,
        "held": watch.held,
        "policy": trainer.model_wrapped.optimizer.fused.grad_config.policy,
    }


def train_alone(
    folder: str, name: str, optimizer_of: Callable[[nn.Module], Any]
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The same in one process, without DeepSpeed and in whole batches -> model, log."""
    job = JOBS[name]
    trained = model(job, folder)
    settings = {"gradient_accumulation_steps": 1}
    with drawn(job.trainer):
        optimizers = optimizer_of(trained), None
        trainer = make(
            job, folder, Watch(trained), model=trained, optimizers=optimizers, settings=settings
        )
        trainer.train()
    return trained, trainer.state.log_history


pytest.importorskip("trl", reason="TRL, which needs Python 3.11, is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("online")
    trainer_jobs.model().save_pretrained(made / "model")
    return str(made)


@pytest.mark.supports("TRL's GRPO, RLOO and online DPO", **of_table(JOBS))
@pytest.mark.parametrize("name", params(JOBS, ["grpo-3"]))
def test_generation_between_steps_equals_one_process(folder, name):
    job = JOBS[name]

    def optimizer_of(model):
        groups = split(model, trainer_jobs.ARGUMENTS["weight_decay"])
        return authors.ordinary(job.rule, groups, {"lr": job.lr})

    trained, log = train_alone(folder, name, optimizer_of)
    after, before = weights(trained), weights(model(job, folder))
    rewards = of(log, "reward") or of(log, "objective/scores")
    assert len(set(rewards)) == STEPS and min(of(log, "grad_norm")) > 0
    for got in worlds.run(2, train, folder, name):
        compare(got["after"], after, before, STEPS)
        found = of(got["log"], "reward") or of(got["log"], "objective/scores")
        assert found == pytest.approx(rewards, rel=1e-5)
        assert of(got["log"], "grad_norm") == pytest.approx(of(log, "grad_norm"), rel=1e-4)
        assert not any(got["held"]), "gathered for generation, and not freed"
        steps = job.arguments.get("gradient_accumulation_steps", 1)
        assert got["policy"] == ("fused" if steps == 1 else "sharded")
