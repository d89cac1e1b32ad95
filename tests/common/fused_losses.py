"""Losses that compute gradients in forward and write these in place in backward, as Liger's do."""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

IN_FEATURES, WIDTH, CLASSES = 6, 9, 5


class InPlaceCrossEntropy(torch.autograd.Function):
    """Linear layer and cross-entropy in one; ``held`` tells where gradients wait for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, target: Tensor, held: str) -> Tensor:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            loss = F.cross_entropy(F.linear(*inputs), target)
        grads = torch.autograd.grad(loss, inputs)
        ctx.held = held
        if held == "saved":
            ctx.save_for_backward(*grads)
        else:
            ctx.grads = grads
        return loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        grads = ctx.saved_tensors if ctx.held == "saved" else ctx.grads
        if not torch.equal(grad_output, torch.ones_like(grad_output)):
            for g in grads:
                # a kernel writes them: no version counter tells of it
                g.copy_(g * grad_output) if ctx.held == "seen" else g.data.mul_(grad_output)
        return *grads, None, None


class Classifier(nn.Module):
    """``factor`` times a cross-entropy, fused in one function or not (``held`` is None)."""

    def __init__(self, held: str | None, factor: float = 1.0) -> None:
        super().__init__()
        self.held = held
        self.factor = factor
        self.body = nn.Linear(IN_FEATURES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        if self.held is None:
            return self.factor * F.cross_entropy(self.head(h), labels)
        return self.factor * InPlaceCrossEntropy.apply(h, self.head.weight, labels, self.held)


def make(held: str | None, factor: float = 1.0) -> Classifier:
    torch.manual_seed(3)
    return Classifier(held, factor)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, IN_FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (8,), generator=generator)
