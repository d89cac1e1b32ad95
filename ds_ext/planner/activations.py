"""What activations take: the model itself is run forward and backward, on tensors without storage.

Autograd keeps and frees what it would keep and free, so that the count is that of a real run of the
same modules: with whatever a model does of its own, and with checkpointing as transformers has it.
Attention is torch's fused one, which keeps no scores. Scratch inside of an operator is not seen.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ds_ext.planner import models
from ds_ext.planner.live import Watch

ATTENTION = "ds_ext_planned"


@dataclass(frozen=True)
class Batch:
    """What a rank computes at once."""

    rows: int  # train_micro_batch_size_per_gpu
    tokens: int  # of each row
    checkpointing: bool  # each layer is computed again in backward


@dataclass(frozen=True)
class Gradients:
    """What becomes of gradients: they are kept until a bucket is full, or for good."""

    bucket: int | None  # elements; None: all are kept
    ahead: bool = False  # a bucket is freed when the next one is full


class Waiting:
    """The gradients that are held."""

    def __init__(self, how: Gradients) -> None:
        self.how = how
        self.bucket: list[Tensor] = []
        self.sent: list[Tensor] = []

    def take(self, param: Tensor) -> None:
        """Takes the gradient of a parameter, as a hook does."""
        assert param.grad is not None
        self.bucket.append(param.grad)
        param.grad = None
        size = self.how.bucket
        if size is not None and sum(g.numel() for g in self.bucket) >= size:
            self.sent = self.bucket if self.how.ahead else []
            self.bucket = []


def peak(
    config: Any,
    dtype: torch.dtype,
    batch: Batch,
    gradients: Gradients,
    adapt: Callable[[nn.Module], None] | None = None,
) -> int:
    """Returns the most bytes that a forward and a backward pass hold beside the weights.

    Args:
        config: of a language model, of transformers.
        dtype: that of weights and activations.
        batch: what one rank computes at once.
        gradients: what becomes of gradients, which count while they are held.
        adapt: changes the model in place, such as by adapters.

    Raises:
        ValueError: the model cannot be run so.
    """
    attention = _attention()
    torch_tells = logging.getLogger("torch._subclasses.fake_tensor")
    torch_tells.disabled = True  # it logs the traceback of an error that is told below
    try:
        with FakeTensorMode(), torch.device("cpu"):
            model: Any = models.build(config, dtype=dtype, attn_implementation=attention).train()
            if adapt is not None:
                adapt(model)
            if batch.checkpointing:
                _checkpoint(model)
            tokens = torch.zeros(batch.rows, batch.tokens, dtype=torch.long, device="cpu")
            return _peak(model, tokens, gradients)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        told = str(error).partition("\n")[0]
        raise ValueError(
            f"--seq: activations of {type(config).__name__} cannot be counted ({told}): leave it "
            "out."
        ) from error
    finally:
        torch_tells.disabled = False


def _peak(model: Any, tokens: Tensor, gradients: Gradients) -> int:
    """The same for a model and tokens without storage."""
    waiting = Waiting(gradients)
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(waiting.take)
    with Watch([*model.parameters(), *model.buffers()]) as watch:
        weights: int = watch.now
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    most: int = watch.most
    return most - weights


def _checkpoint(model: Any) -> None:
    """Turns checkpointing on, which transformers is about to rename."""
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _attention() -> str:
    """The name, to transformers, of attention that is causal by itself and needs no mask."""
    from transformers import AttentionInterface

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        found = functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True, enable_gqa=True
        )
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION, attention)
    return ATTENTION
