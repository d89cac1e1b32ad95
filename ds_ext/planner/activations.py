"""Measures activation memory: runs the model forward and backward on fake tensors.

Autograd keeps and frees the same tensors as in a real run, so the count includes everything that
modules keep, and transformers' checkpointing. Attention is torch's fused implementation, which
keeps no scores. Temporary memory inside operators is not counted.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ext.backward.buckets import has_room
from ds_ext.distributed.groups import with_attribute
from ds_ext.forward.batch_splits import layers_of, split_batch
from ds_ext.forward.chunked_loss import chunk_loss
from ds_ext.planner import models
from ds_ext.planner.live_memory import LiveMemory
from ds_ext.planner.memory import GradientLifetime

ATTENTION = "ds_ext_planned"


@dataclass(frozen=True)
class MicroBatch:
    """The size of a rank's micro-batch."""

    rows: int  # train_micro_batch_size_per_gpu
    tokens: int  # per row
    checkpointing: bool  # whether layers are recomputed in backward
    splits: int = 1  # pieces in which each layer runs: ds_ext.batch_splits
    chunked_loss: bool = False


class HeldGradients:
    """The live gradients in a backward pass."""

    def __init__(self, lifetime: GradientLifetime) -> None:
        self.lifetime = lifetime
        self.bucket: list[Tensor] = []
        self.earlier = deque[list[Tensor]](maxlen=lifetime.behind)

    def watch(self, params: Sequence[Tensor]) -> None:
        """Takes the gradients of parameters when the last of them has come."""

        def take(_: Tensor) -> None:
            if all(param.grad is not None for param in params):
                for param in params:
                    self.take(param)

        for param in params:
            param.register_post_accumulate_grad_hook(take)

    def take(self, param: Tensor) -> None:
        """Moves a parameter's gradient into the bucket."""
        assert param.grad is not None
        size, more = self.lifetime.bucket, param.grad.numel()
        if size is not None and not has_room(self.elements, more, size):
            self.step()
        self.bucket.append(param.grad)
        param.grad = None
        if size is not None and self.elements >= size:
            self.step()

    @property
    def elements(self) -> int:
        """The elements in the bucket."""
        return sum(grad.numel() for grad in self.bucket)

    def step(self) -> None:
        """Copies what is offloaded to the device while the gradients of a bucket are alive."""
        size = round(self.elements * self.lifetime.staged_bytes)
        torch.empty(size, dtype=torch.uint8, device="cpu")
        self.earlier.append(self.bucket)
        self.bucket = []


def peak(config: Any, dtype: torch.dtype, batch: MicroBatch, gradients: GradientLifetime) -> int:
    """Returns the peak bytes of a forward and a backward pass, including gradients, less weights.

    Args:
        config: the transformers config of a language model. ValueError if it cannot run.
        dtype: the dtype of weights and activations.
        batch: the micro-batch of one rank.
        gradients: how long gradients live.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # logs tracebacks of errors
    try:
        with with_attribute(logger, "disabled", True), FakeTensorMode(), torch.device("cpu"):
            model: Any = models.build(config, dtype=dtype, attn_implementation=ATTENTION).train()
            if batch.checkpointing:
                _checkpoint(model)
            split_batch(model, batch.splits)
            if batch.chunked_loss:
                chunk_loss(model)
            tokens = torch.zeros(batch.rows, batch.tokens, dtype=torch.long, device="cpu")
            return _peak(model, tokens, gradients)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        text = str(error).partition("\n")[0]
        what = f"activations of {type(config).__name__} cannot be counted ({text})"
        raise ValueError(f"--seq: {what}: leave it out.") from error


def _peak(model: Any, tokens: Tensor, gradients: GradientLifetime) -> int:
    """Implements ``peak`` for a model and tokens that are fake tensors."""
    waiting = HeldGradients(gradients)
    leaves = layers_of(model) if gradients.together else []
    together = [[*layer.parameters()] for layer in leaves]
    inside = {param for params in together for param in params}
    alone = [[p] for p in model.parameters() if p.requires_grad and p not in inside]
    for params in together + alone:
        waiting.watch(params)
    with LiveMemory([*model.parameters(), *model.buffers()]) as watch:
        weights = watch.now
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        waiting.step()
    return int(watch.most - weights)


def _checkpoint(model: Any) -> None:
    """Enables checkpointing by its new or old name in transformers."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _attention(*args: Any, softcap: float | None = None, **options: Any) -> Any:
    """Transformers' attention by torch, without Gemma 2's ``softcap``, which torch does not have.

    transformers makes no mask for an attention that it does not know.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **options)
