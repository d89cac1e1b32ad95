"""DeepSpeed's ZeRO-3 on one rank, by itself and under HF Trainer, compared with plain steps.

The judge is that of ``one_rank``. ``DS_EXT_COMMUNICATE_ALONE=1`` makes the rank call NCCL.
"""

import importlib.util
import os
import tempfile
from typing import Any
from unittest import mock

from torch import Tensor, nn

from benchmarks.gpu import one_rank
from benchmarks.gpu.setting import RIGHT, WRONG, Row, Rows, Setting, Skip, separately, using_kernels
from benchmarks.train import join_world_of_one

LR = 1e-3


def rows(on: Setting) -> Rows:
    """Trains by DeepSpeed's engine, and by HF Trainer."""
    if importlib.util.find_spec("deepspeed") is None:
        raise Skip("DeepSpeed is not installed: `python -m benchmarks gpu --wheels` says how")
    for row in separately(on, train_all, on):
        yield "ZeRO-3 on one rank", row


def train_all(on: Setting) -> list[Row]:
    """Trains by each optimizer in both ways."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for 30 s
    join_world_of_one()
    deepspeed.init_distributed("gloo" if on.is_rehearsal else "nccl", verbose=False)
    found = []
    with (
        mock.patch.dict(os.environ, {"DS_EXT_COMMUNICATE_ALONE": "1"}),
        using_kernels(on.trains_by),
    ):
        names = on.some(one_rank.OPTIMIZERS)
        judged = {name: one_rank.judge(name, 1, on.device, on) for name in names}
        models = {name: one_rank.model_of(on.device, on) for name in names}
        for name, (before, expected) in judged.items():
            found.append(row(name, "engine", by_engine(name, on), expected, before))
        # Last, because transformers builds models under ``zero.Init`` after it.
        for name, (before, expected) in judged.items():
            weights = by_trainer(models[name], name, on)
            found.append(row(name, "HF Trainer", weights, expected, before))
    return found


def row(
    name: str, way: str, found: list[Tensor], expected: list[Tensor], before: list[Tensor]
) -> Row:
    error = one_rank.error_of(found, expected, before)
    verdict = RIGHT if error <= one_rank.CLOSE else WRONG
    return {"optimizer": name, "way": way, "error": error, "verdict": verdict}


def config(name: str, on: Setting) -> dict[str, Any]:
    """A config of DeepSpeed for fp32 weights, with the optimizer's defaults as the judge has."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": on.exact_bucket},
        "optimizer": {"type": name, "params": {}},
    }


def by_engine(name: str, on: Setting) -> list[Tensor]:
    """Weights after steps of DeepSpeed's engine."""
    import deepspeed

    model = one_rank.model_of(on.device, on)
    engine, *_ = deepspeed.initialize(model=model, config=config(name, on))
    for step in range(on.exact_steps):
        engine.backward(one_rank.loss_of(engine, step, 0, on.device, on))
        engine.step()
    found = wholes(engine.module)
    engine.destroy()
    return found


def by_trainer(model: nn.Module, name: str, on: Setting) -> list[Tensor]:
    """Weights after steps of HF Trainer with the same config."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=on.exact_steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=on.is_rehearsal,
            deepspeed=config(name, on),
        )
        data = [one_rank.batch(step, 0, on) for step in range(on.exact_steps)]
        trainer = InOrder(model=model, args=arguments, train_dataset=data)
        trainer.train()
    return wholes(trainer.model_wrapped.module)


def wholes(model: nn.Module) -> list[Tensor]:
    """Copies of the weights; one rank's partitions are whole."""
    return [
        p.ds_tensor.detach()[: p.ds_numel].view(p.ds_shape).clone()  # type: ignore[attr-defined]
        for p in model.parameters()
    ]
