"""The benchmark of estimated learning rates estimates as Prodigy's formula says."""

import pytest
import torch
from torch import nn

from benchmarks import estimate

D0, COEFFICIENT, STEPS, EVERY = 1e-3, 2.0, 12, 3
FACTORS = [min(1.0, (t + 1) / 4) for t in range(STEPS)]


class Descent:
    """Plain gradient descent, which keeps the weights and gradients of all steps."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.x, self.g, self.rates = [], [], []

    def rate(self, rate):
        self.rates.append(rate)

    def step(self, batch):
        own = list(self.model.parameters())
        self.x.append([p.detach().clone() for p in own])
        loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.g.append([p.grad.clone() for p in own])
        with torch.no_grad():
            for p in own:
                p -= self.rates[-1] * p.grad
                p.grad = None
        return loss.detach()


def norm(rule, s, x0):
    """The norm of the elements that count, [tensors] -> number."""
    if rule == "lomo":
        return (EVERY * sum(x.square().sum() for x in s)).sqrt() / EVERY
    scales = [x.square().mean().sqrt() if rule == "adalomo" else 1.0 for x in x0]
    return sum(scale * x.abs().sum() for scale, x in zip(scales, s, strict=True))


def expected(rule, inner):
    """The estimates after each step, from sums over the whole history."""
    d, found = D0, []
    x0, weights = inner.x[0], []
    for k in range(STEPS):
        weights.append(d**2 * FACTORS[k])
        decayed = [w * estimate.BETA3 ** (k - i) for i, w in enumerate(weights)]
        r, s = 0.0, [0.0] * len(x0)
        for w, x, g in zip(decayed, inner.x, inner.g, strict=False):
            for i, (start, now, grad) in enumerate(zip(x0, x, g, strict=True)):
                away = (start - now).flatten()[::EVERY]
                r += w * (grad.flatten()[::EVERY] * away).sum()
                s[i] = s[i] + w * grad.flatten()[::EVERY]
        d = max(d, float(COEFFICIENT * r / norm(rule, s, x0)))
        found.append(d)
    return found


@pytest.mark.parametrize("rule", estimate.RULES)
def test_the_estimate_is_prodigys(rule, monkeypatch):
    monkeypatch.setattr(estimate, "EVERY", EVERY)
    inner = Descent()
    stepper = estimate.Estimated(inner, rule, D0, COEFFICIENT)
    torch.manual_seed(1)
    found = []
    for factor in FACTORS:
        stepper.rate(factor)
        stepper.step(torch.randn(8, 7, dtype=torch.float64))
        found.append(stepper.d)
    wanted = expected(rule, inner)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert found[-1] > 3 * D0  # it grows
    first = sum(float(g.flatten()[::EVERY].square().sum()) for g in inner.g[0])
    scale = (EVERY * first) ** -0.5 if rule == "lomo" else 1.0
    used = [d * scale * factor for d, factor in zip([D0, *found], FACTORS, strict=False)]
    used[0] *= rule != "lomo"  # the first step only measures the gradient
    assert inner.rates == pytest.approx(used, rel=1e-4)
