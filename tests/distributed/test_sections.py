"""Fused matrices that Muon splits, on real ranks against torch's Muon of separate parameters."""

import pytest
import torch
from torch import nn

from tests import worlds
from tests.common import low_rank
from tests.common.choose import params
from tests.common.updates import check, error
from tests.distributed import sections_jobs
from tests.distributed.sections_jobs import KINDS, STEPS

WAYS = (None, 0, 1, 2, 3, "fsdp2")
CASES = [(kind, ranks, way) for kind in KINDS for ranks in (2, 3) for way in WAYS]
QUICK = {("phi3", 2, "fsdp2"), ("gpt_neox", 3, 2), ("gpt2", 2, 3)}
CLOSE = 1e-3  # what Muon's iteration in fp32 may be off: test_muon.py

# How a matrix consists of others, written with torch's own split.
SECTIONS = {
    ("phi3", "qkv_proj"): lambda x: x.split([24, 12, 12]),
    ("phi3", "gate_up_proj"): lambda x: x.split([20, 20]),
    ("phi3", "o_proj"): lambda x: x.split(6),
    ("gpt_neox", "query_key_value"): lambda x: x.view(4, 18, 24).split(6, 1),
    ("gpt2", "c_attn"): lambda x: x.split([24, 24, 24], 1),
}


class Apart(torch.optim.Optimizer):
    """torch.optim.Muon of copies of a matrix's parts, which are copied back."""

    def __init__(self, p, sections, **hypers):
        self.p, self.sections = p, sections
        self.parts = [nn.Parameter(x.clone().reshape(-1, x.shape[-1])) for x in sections(p.data)]
        self.muon = torch.optim.Muon(self.parts, **hypers)

    @torch.no_grad()
    def step(self):
        for part, g in zip(self.parts, self.sections(self.p.grad), strict=True):
            part.grad = g.clone().view_as(part)
        self.muon.step()
        for part, x in zip(self.parts, self.sections(self.p.data), strict=True):
            x.copy_(part.view_as(x))

    def zero_grad(self):
        self.p.grad = None


def trained(kind, got, ranks, is_split=True):
    """One process, with the mean of the ranks' losses."""
    model, made = sections_jobs.model_of(kind), []
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, p in named.items():
        own, lr, decay = got["groups"][name]
        layer = name.split(".")[-2]
        if own == "AdamW":
            made.append(torch.optim.AdamW([p], lr=lr, weight_decay=decay))
        elif is_split and (kind, layer) in SECTIONS:
            made.append(Apart(p, SECTIONS[kind, layer], lr=lr, weight_decay=decay))
        else:
            made.append(torch.optim.Muon([p], lr=lr, weight_decay=decay))
    with low_rank.in_dtype(torch.float64):
        for step in range(STEPS):
            losses = [sections_jobs.loss_of(model, step, rank) for rank in range(ranks)]
            torch.stack(losses).mean().backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
    assert is_split == any(isinstance(x, Apart) for x in made)
    return named


@pytest.mark.parametrize("kind, ranks, way", params(CASES, QUICK))
def test_sections_are_stepped_as_separate_parameters(kind, ranks, way):
    got = worlds.run(ranks, sections_jobs.train, kind, way)[0]
    assert got["identical"]
    after = trained(kind, got, ranks)
    check(got["after"], after, got["before"], STEPS, CLOSE)
    whole = trained(kind, got, ranks, is_split=False)
    fused = {n: p for n, p in whole.items() if (kind, n.split(".")[-2]) in SECTIONS}
    assert error(got["after"], fused, got["before"]) > 0.1


def test_wrong_sizes_are_refused_on_every_rank():
    for said in worlds.run(2, sections_jobs.refused, 3):
        assert said.startswith(
            "optimizer.params.param_groups[0].split is [24, 12], but "
            "model.layers.0.self_attn.qkv_proj.weight has the shape [48, 24]"
        )
