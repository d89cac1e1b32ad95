"""The compared optimizers: ds_ext's, AdamW under DeepSpeed, LoRA, and published packages.

A candidate creates a stepper of a model. All steppers have the same interface: ``step`` trains on a
batch, and ``rate`` multiplies the learning rates of all groups.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.matrix.texts import Batch
from ds_ext.rates import RATES

LORA_RANK = 16


class Stepper(Protocol):
    """Trains one model."""

    model: nn.Module

    def step(self, batch: Batch) -> Tensor:
        """Runs forward, backward and the optimizer's step on a batch; returns the loss."""
        ...

    def rate(self, factor: float) -> None:
        """Sets the learning rate to ``factor`` times its initial value."""
        ...

    def close(self) -> None:
        """Frees resources that the model would not free by itself."""
        ...


@dataclass(frozen=True)
class Candidate:
    """An optimizer with its settings.

    ``make`` receives a model, which it may change, a learning rate, and a seed for the optimizer's
    random numbers. It returns a stepper.
    """

    label: str
    start: float  # a likely learning rate: SmolLM2-135M's best on `sounds`, if known
    make: Callable[[nn.Module, float, int], Stepper]
    tier: int = 0  # 1: published packages, after all others; 2: slow ones, last


class PlainStepper:
    """Trains a model with a published optimizer, without DeepSpeed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def step(self, batch: Batch) -> Tensor:
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def rate(self, factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def close(self) -> None:
        del self.optimizer


class EngineStepper(PlainStepper):
    """Trains a model under DeepSpeed's engine with one rank; ``own`` is the section "ds_ext"."""

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        params: Mapping[str, Any],
        stage: int,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        import deepspeed

        import ds_ext  # noqa: F401  registers the optimizers with DeepSpeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": kind, "params": dict(params)},
            "steps_per_print": 10**9,
            **({"ds_ext": own} if own else {}),
        }
        self.engine, optimizer, *_ = deepspeed.initialize(model=model, config=config)
        super().__init__(model, optimizer)

    def step(self, batch: Batch) -> Tensor:
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.optimizer
        gc.collect()


class LomoStepper:
    """lomo-optim's AdaLomo, which steps inside backward."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        from lomo_optim import AdaLomo

        self.model, self.lr, self.factor = model, lr, 1.0
        # It allocates its state with ``.cuda()``.
        with mock.patch.object(Tensor, "cuda", lambda self: self):
            self.optimizer = AdaLomo(model, lr=lr, loss_scale=None)

    def step(self, batch: Batch) -> Tensor:
        loss = self.model(**batch).loss
        self.optimizer.fused_backward(loss, self.lr * self.factor)
        return loss.detach()

    def rate(self, factor: float) -> None:
        self.factor = factor

    def close(self) -> None:
        del self.optimizer


def ours(
    rule: str, own: Mapping[str, Any] | None = None, **params: Any
) -> Callable[[nn.Module, float, int], Stepper]:
    """Returns a function that creates a stepper of a ds_ext optimizer, without ZeRO."""

    def make(model: nn.Module, lr: float, seed: int) -> Stepper:
        given = {"lr": lr, "weight_decay": 0.0, "seed": seed} | params
        return EngineStepper(model, f"ds_ext.{rule}", given, stage=0, own=own)

    return make


def adamw(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns torch's AdamW under DeepSpeed's ZeRO-1, with fp32 masters of bf16 weights."""
    given = {"lr": lr, "weight_decay": 0.0, "torch_adam": True}
    return EngineStepper(model, "AdamW", given, stage=1)


def lora(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns the same for PEFT adapters of all linear layers; the model is frozen."""
    import peft

    config = peft.LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return adamw(peft.get_peft_model(model, config), lr, seed)


def lomo_adalomo(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns lomo-optim's AdaLomo."""
    return LomoStepper(model, lr)


def came(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns came-pytorch's CAME."""
    from came_pytorch import CAME

    return PlainStepper(model, CAME(model.parameters(), lr=lr, weight_decay=0.0))


def galore(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns galore-torch's GaLoreAdamW with the settings of its README and ours, rank 128."""
    from galore_torch import GaLoreAdamW

    low = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    return PlainStepper(model, GaLoreAdamW(_low_rank(model, low), lr=lr, weight_decay=0.0))


def apollo(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns apollo-torch's APOLLO with the settings of its README, rank 256."""
    from apollo_torch import APOLLOAdamW

    low = {
        "rank": 256,
        "proj": "random",
        "scale_type": "channel",
        "scale": 1,
        "update_proj_gap": 200,
        "proj_type": "std",
    }
    return PlainStepper(model, APOLLOAdamW(_low_rank(model, low), lr=lr, weight_decay=0.0))


def _low_rank(model: nn.Module, low: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups: the matrices of linear layers except the head, with ``low``, and the rest."""
    layers = (m for n, m in model.named_modules() if type(m) is nn.Linear and "lm_head" not in n)
    matrices = [layer.weight for layer in layers]
    known = set(matrices)
    rest = [p for p in model.parameters() if p not in known]
    return [{"params": rest}, {"params": matrices} | low]


def adafactor(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns transformers' Adafactor with steps relative to the weights, times ``lr``."""
    from transformers import Adafactor

    return PlainStepper(model, Adafactor(model.parameters(), lr=lr, relative_step=False))


def adamw8bit(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns bitsandbytes' AdamW with 8-bit moments."""
    from bitsandbytes.optim import AdamW8bit

    return PlainStepper(model, AdamW8bit(model.parameters(), lr=lr, weight_decay=0.0))


def gefen(model: nn.Module, lr: float, seed: int) -> Stepper:
    """Returns Gefen of the package gefen, which is installed for this candidate only."""
    from gefen import Gefen

    return PlainStepper(model, Gefen(model.named_parameters(), lr=lr, fused=False))


CANDIDATES: dict[str, Candidate] = {
    "deepspeed-adamw": Candidate("AdamW, DeepSpeed ZeRO-1", 3e-4, adamw),
    "adalomo": Candidate("AdaLomo", 3e-3, ours("AdaLomo")),
    "lora": Candidate("LoRA r = 16, AdamW", 3e-3, lora),
    "flashadamw": Candidate("FlashAdamW", 3e-4, ours("FlashAdamW")),
    "came": Candidate("CAME", 3e-5, ours("CAME")),
    "came-8bit": Candidate("CAME, 8-bit momentum", 3e-5, ours("CAME", nbits=8)),
    "lomo": Candidate("LOMO", 3e-3, ours("LOMO")),
    "adamw": Candidate("ds_ext.AdamW", 3e-4, ours("AdamW")),
    "lion": Candidate("Lion", 1e-4, ours("Lion")),
    "lamb": Candidate("LAMB", 1e-3, ours("LAMB")),
    "sinkgd": Candidate("SinkGD", 1e-3, ours("SinkGD")),
    "scale": Candidate("SCALE", 1e-4, ours("SCALE")),
    "apollo": Candidate("APOLLO", 1e-3, ours("APOLLO")),
    "apollomini": Candidate("APOLLO-Mini", 3e-4, ours("APOLLOMini")),
    "galoreadamw": Candidate("GaLoreAdamW", 1e-3, ours("GaLoreAdamW")),
    "muon": Candidate("Muon", 1e-3, ours("Muon", **RATES["muon"].params), tier=2),
    "adalomo-int8": Candidate(
        "AdaLomo, weights in int8", 1e-3, ours("AdaLomo", {"weight_storage": "int8"}), tier=2
    ),
    "lomo-optim": Candidate("lomo-optim's AdaLomo", 3e-3, lomo_adalomo, tier=1),
    "came-pytorch": Candidate("came-pytorch's CAME", 3e-5, came, tier=1),
    "bitsandbytes": Candidate("bitsandbytes' AdamW8bit", 3e-4, adamw8bit, tier=1),
    "transformers": Candidate("transformers' Adafactor", 1e-3, adafactor, tier=1),
    "galore-torch": Candidate("galore-torch's GaLoreAdamW", 1e-3, galore, tier=1),
    "apollo-torch": Candidate("apollo-torch's APOLLO", 1e-3, apollo, tier=1),
    "gefen": Candidate("gefen's Gefen", 3e-4, gefen, tier=1),
}
