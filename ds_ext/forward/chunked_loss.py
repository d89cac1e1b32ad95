"""The loss of a causal language model in chunks, so that its logits never exist as a whole.

The logits of 2,048 tokens and a vocabulary of 128,256 take 1 GiB in fp32, and their gradient as
much again. Here the logits of a chunk of tokens exist while its loss is computed, and once more in
backward. For a plain ``nn.Linear``, backward adds up the gradient of the weight in place.
Otherwise each chunk is a checkpointed segment, and autograd holds two such gradients at once.

The chunks run inside the ``forward`` of the output head, so that ZeRO-3 and FSDP2 gather its weight
once. The graph can be run backward twice, as exact clipping does, because nothing that it saved is
overwritten.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_ext import logs
from ds_ext.forward.replaced import Forward, restore

CHUNK_LOGITS = 2**26  # logits of a chunk by default: 256 MiB in fp32
# What models do with logits after their head, by keys of transformers' configs.
_UNUSED = "chunk_loss has no effect without labels: the model computes all logits"
SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def chunk_loss(model: nn.Module, chunks: int | None = None, label_smoothing: float = 0.0) -> None:
    """Makes a causal language model of transformers compute its loss in chunks of tokens.

    If the model gets ``labels`` and gradients are enabled, each chunk's logits exist only while its
    loss and its gradient are computed, and the output's ``logits`` are None. Otherwise the model
    computes its logits as before. HF Trainer passes no ``labels`` with ``label_smoothing_factor``.
    In bf16, the chunks' gradients of the head's weight are added up in bf16.

    Args:
        model: the model, or one that contains it, before ``fully_shard`` or
            ``deepspeed.initialize``.
        chunks: the number of chunks; by default the fewest with at most 2^26 logits each. 0 undoes
            an earlier call.
        label_smoothing: passed to ``torch.nn.functional.cross_entropy``.

    Raises:
        ValueError: a value is invalid, the model is not a causal language model of transformers
            with its default loss, or it scales its logits after the head.
    """
    if chunks is not None and (type(chunks) is not int or chunks < 0):
        raise ValueError(
            f"chunk_loss: chunks is {chunks!r}; allowed: a whole number >= 0, or None."
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"chunk_loss: label_smoothing is {label_smoothing!r}; allowed: a number in [0, 1]."
        )
    causal, head = _causal(model)
    if getattr(causal, "_loss_function", None) is chunked_loss:
        del causal._loss_function
    inner_head, inner = restore(head, ChunkedHead), restore(causal, Labelled)
    if chunks == 0:
        return
    _refuse(causal)
    head_forward = ChunkedHead(head, inner_head, chunks, label_smoothing)
    head.forward = head_forward
    causal.forward = Labelled(causal, inner, head_forward)
    causal._loss_function = chunked_loss


@dataclass
class ChunkedHead(Forward):
    """The ``forward`` of an output head: sums of the loss if targets are set, else logits."""

    chunks: int | None
    label_smoothing: float
    targets: Tensor | None = None  # [batch, tokens]; those of a forward pass in progress
    ignore_index: int = -100

    def __call__(self, hidden: Tensor) -> Any:
        """Returns logits; or ``(sums,)``, [chunks] in fp32, of the loss of each chunk's tokens.

        The sums are in a tuple because a model that computes with its logits then raises an error.
        """
        if self.targets is None:
            return self.whole(hidden)
        tokens, targets = hidden.flatten(0, -2), self.targets.flatten()
        if len(tokens) != len(targets):
            raise ValueError(
                f"chunk_loss: the head gets {len(tokens)} tokens for {len(targets)} labels; do not "
                "set logits_to_keep with labels."
            )
        width = cast(int, self.module.out_features)  # of nn.Linear, and of adapters around it
        count = self.chunks or -(-len(tokens) * width // CHUNK_LOGITS)
        if self.is_plain(tokens):
            weight, bias = self.module.weight, self.module.bias
            return (_LinearLoss.apply(tokens, weight, bias, targets, count, self),)
        pieces = zip(tokens.tensor_split(count), targets.tensor_split(count), strict=True)
        sums = [
            checkpoint(lambda x, t: self.total(self.whole(x), t), *piece, use_reentrant=False)
            for piece in pieces
        ]
        return (torch.stack(sums),)

    def is_plain(self, tokens: Tensor) -> bool:
        """Whether the head only multiplies by its weight: no adapter, DTensor or autocast."""
        return (
            self.inner is None
            and type(self.module).forward is nn.Linear.forward
            and not hasattr(self.module.weight, "to_local")
            and not torch.is_autocast_enabled(tokens.device.type)
        )

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of the loss of some tokens, in fp32 (fp64 for fp64 models)."""
        return F.cross_entropy(
            _wide(logits),
            targets.to(logits.device),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )

    def sums(
        self, tokens: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: int
    ) -> Tensor:
        """Returns the sums of the loss of each chunk's tokens, [chunks], by a linear head."""
        pieces = zip(tokens.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        return torch.stack([self.total(F.linear(x, weight, bias), t) for x, t in pieces])

    def gradient_(self, logits: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        """Overwrites logits by the gradient of ``factor`` times ``total``, and returns them.

        It is factor · (softmax − (1 − s) · onehot − s / width), s the label smoothing, and 0 for
        tokens that are ignored. Only one copy of the logits in fp32 exists at a time.
        """
        s = self.label_smoothing
        targets = targets.to(logits.device)
        is_used = targets != self.ignore_index
        p = _wide(logits)
        p = p.sub_(p.amax(-1, keepdim=True)).exp_()
        scale = torch.where(is_used, factor, 0.0).unsqueeze(-1)
        p.mul_(scale / p.sum(-1, keepdim=True))
        at = targets.where(is_used, 0).unsqueeze(-1)
        p.scatter_add_(-1, at, scale.to(p.dtype) * (s - 1))
        if s:
            p.sub_(scale * (s / p.shape[-1]))
        return logits.copy_(p)


class _LinearLoss(torch.autograd.Function):
    """Sums of the loss of chunks of tokens, from the hidden states and a linear head."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunks: int,
        head: ChunkedHead,
    ) -> Tensor:
        """[tokens, width], [vocabulary, width], [vocabulary], [tokens] -> [chunks]."""
        ctx.save_for_backward(tokens, weight, bias, targets)
        ctx.head = replace(head, targets=None)
        return head.sums(tokens, weight, bias, targets, chunks)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        """The gradients of the hidden states, the weight and the bias."""
        tokens, weight, bias, targets = ctx.saved_tensors
        if torch.is_grad_enabled():  # ``create_graph``, as for a gradient penalty
            # Aliases, because the hooks of a weight run when the outer pass has its gradient.
            given = [x if x is None else x.view_as(x) for x in (tokens, weight, bias)]
            sums = ctx.head.sums(*given, targets, len(grads))
            needs = ctx.needs_input_grad[:3]
            needed = [x for x, need in zip(given, needs, strict=True) if x is not None and need]
            found = iter(torch.autograd.grad(sums, needed, grads, create_graph=True))
            return *[next(found) if need else None for need in needs], *[None] * 3
        wanted = zip((tokens, weight, bias), ctx.needs_input_grad, strict=False)
        by_tokens, by_weight, by_bias = [
            torch.zeros_like(x) if need else None for x, need in wanted
        ]
        split = [x.tensor_split(len(grads)) for x in (tokens, targets)]
        begin = 0
        for x, t, grad in zip(*split, grads, strict=True):
            by_logits = ctx.head.gradient_(F.linear(x, weight, bias), t, grad)
            if by_tokens is not None:
                torch.mm(by_logits, weight, out=by_tokens[begin : begin + len(x)])
            if by_weight is not None:
                by_weight.addmm_(by_logits.T, x)
            if by_bias is not None:
                by_bias += by_logits.sum(0)
            begin += len(x)
        return by_tokens, by_weight, by_bias, None, None, None


@dataclass
class Labelled(Forward):
    """The ``forward`` of a causal model, which tells its head the targets."""

    head: ChunkedHead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; with labels and gradients, without logits."""
        given = inspect.signature(self).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        labels = given.get("labels")
        if labels is None or not torch.is_grad_enabled():
            if torch.is_grad_enabled() and self.module.training:
                logs.show_once(_UNUSED)
            return self.whole(*args, **kwargs)
        self.head.ignore_index = given.get("ignore_index", -100)
        shifted = given.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=self.head.ignore_index)[..., 1:]
        self.head.targets = shifted
        try:
            output = self.whole(*args, **kwargs)
        finally:
            self.head.targets = None
        if isinstance(output, tuple):  # return_dict=False: the loss, the logits, and others
            return (output[0], None, *output[2:])
        output["logits"] = None
        return output


def chunked_loss(
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Returns the mean of sums that the head has computed, as transformers' ``ForCausalLMLoss``."""
    if not isinstance(logits, tuple):  # without gradients
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(  # type: ignore[no-any-return]
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    (sums,) = logits
    if num_items_in_batch is None:
        targets = labels[..., 1:] if shift_labels is None else shift_labels
        num_items_in_batch = (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(sums.device)
    total: Tensor = sums.sum()
    return total / num_items_in_batch


def _causal(model: nn.Module) -> tuple[Any, nn.Module]:
    """The causal language model inside a module, and its output head. ValueError if none."""
    for module in model.modules():
        # By class: PEFT's models have the attributes of the model that they wrap.
        if hasattr(type(module), "get_output_embeddings") and hasattr(
            type(module), "loss_function"
        ):
            head = cast(Any, module).get_output_embeddings()
            if isinstance(head, nn.Module):
                return module, head
    raise ValueError(
        f"chunk_loss: {type(model).__name__} contains no language model of transformers with an "
        "output head. Use it for AutoModelForCausalLM models."
    )


def _refuse(causal: Any) -> None:
    """Raises ValueError for a model whose loss is not the mean of its head's cross entropies."""
    name = getattr(causal.loss_function, "__name__", type(causal.loss_function).__name__)
    if name != "ForCausalLMLoss":
        raise ValueError(
            f"chunk_loss: the loss of {type(causal).__name__} is {name}; only ForCausalLMLoss, the "
            "default of causal language models, can be computed in chunks."
        )
    config = causal.config.get_text_config()
    scaled = [key for key in SCALED if getattr(config, key, None) not in (None, 1, 1.0)]
    if scaled:
        raise ValueError(
            f"chunk_loss: {type(causal).__name__} changes its logits after the head ({scaled[0]} = "
            f"{getattr(config, scaled[0])}), which chunk_loss does not support."
        )


def _wide(logits: Tensor) -> Tensor:
    """Logits in fp32; in fp64 if they are."""
    return logits if logits.dtype == torch.float64 else logits.float()
