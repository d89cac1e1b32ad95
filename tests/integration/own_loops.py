"""accelerate's training loop on real ranks and in one process; QLoRA's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import peft
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from ds_ext.optimizer import OPTIMIZERS
from tests.common import engines
from tests.common.plain import weights
from tests.common.ranks import message, whole
from tests.integration.trainer_jobs import adapted, config, data, load

EPOCHS = 3
ROWS = 12  # of an epoch: three batches a rank, so that of two at a time one is left over
WARMUP = {"total_num_steps": 20, "warmup_num_steps": 3}


@dataclass(frozen=True)
class Loop:
    rule: str
    lr: float
    max_norm: float = 0.0
    accumulation: int = 1
    stage: int = 3


LOOPS = {"adalomo": Loop("adalomo", 1e-2), "lomo-clip": Loop("lomo", 0.1, max_norm=0.2)}
LOOPS |= {"came-accumulation": Loop("came", 1e-3, accumulation=2)}
LOOPS |= {"lomo-both": Loop("lomo", 0.1, max_norm=0.2, accumulation=2)}


def accelerate(folder: str, name: str) -> dict[str, Any]:
    """This rank's part of accelerate's loop with optimizer and scheduler from the config."""
    loop, params = LOOPS[name], WARMUP | {"warmup_max_lr": "auto"}
    made = config(loop.rule) | {
        "bf16": {"enabled": False},
        "gradient_clipping": loop.max_norm,
        "gradient_accumulation_steps": loop.accumulation,
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    PartialState(cpu=True)  # without a GPU accelerate finds other ranks only if told
    plugin = DeepSpeedPlugin(hf_ds_config=made)
    accelerator = Accelerator(
        gradient_accumulation_steps=loop.accumulation, deepspeed_plugin=plugin
    )
    model = load(folder)
    optimizer = DummyOptim(model.parameters(), lr=loop.lr, weight_decay=0.0)
    scheduler = DummyScheduler(optimizer)
    loader = torch.utils.data.DataLoader(data()[:ROWS], batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    norms, rates = [], []
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), loop.max_norm))
                    rates.append(model.get_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return {"after": whole(model.module), "norms": norms, "rates": rates}


def micro_batches() -> Iterator[list[dict[str, torch.Tensor]]]:
    """What the ranks see at once, 2 rows each -> the batch of each rank."""
    rows = data()[:ROWS]
    for first in range(0, ROWS, 4):
        yield [
            {key: torch.stack([row[key] for row in part]) for key in part[0]}
            for part in (rows[first : first + 2], rows[first + 2 : first + 4])
        ]


def accelerated_reference(loop: Loop, model, optimizer) -> tuple[list[float], list[float]]:
    """accelerate's loop in one process -> (norms, learning rates after each step)."""
    scheduler = WarmupDecayLR(optimizer, warmup_max_lr=loop.lr, **WARMUP)
    norms, rates = [], []
    for _ in range(EPOCHS):
        for number, parts in enumerate(micro_batches(), 1):
            loss = sum(model(**part).loss for part in parts) / len(parts)
            (loss / loop.accumulation).backward()
            if number % loop.accumulation and 4 * number < ROWS:
                continue
            limit = loop.max_norm or torch.inf
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    return norms, rates


def same_data(counts: tuple[str | None, ...], config: dict[str, Any]) -> str:
    """What an engine says beside accelerate, of which each rank has asked for "cpu", "" or none."""
    PartialState._reset_state()
    asked = counts[dist.get_rank()]
    if asked is not None:
        PartialState(cpu=asked == "cpu")
    optimizer = {"optimizer": {"type": "LOMO", "params": {"lr": 0.1}}}
    made = {"train_micro_batch_size_per_gpu": 1} | optimizer | config
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return message(lambda: deepspeed.initialize(model=model, config=made)[0].destroy())


def quantized(folder: str) -> peft.PeftModel:
    """A model of ``folder`` with a frozen base in 4 bits (QLoRA), and adapters."""
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    base = LlamaForCausalLM.from_pretrained(folder, quantization_config=bits, device_map="cpu")
    return adapted(base)


# Hyper-parameters of AdamW. By the default ``eps``, 1e-8, a gradient near zero (2e-8, where
# others are 3e-3) would give a step as large as theirs, and with it its rounding error.
QLORA = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}


def qlora(folder: str, stage: int | None) -> dict[str, torch.Tensor]:
    """Steps by AdamW of ds_ext -> all weights. Without a stage, inside a plain backward."""
    model = quantized(folder)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS["adamw"](trained, **QLORA)
    engine = engines.start(model, optimizer, stage)
    for rows in qlora_data(dist.get_rank()):
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()
    return weights(model)


def qlora_data(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 67, (3, 2, 16), generator=generator)
