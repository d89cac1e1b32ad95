"""The models of ``scale``: Hugging Face's own modules in their true shapes, without storage."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import transformers
from torch import nn

from benchmarks.counting import NORM, Bucket, Rule, reduced
from benchmarks.memory import llama
from ds_ext.memory import KNOWN

TOKENS = 8  # of the pass that gives the gradients' order; their number changes no size


class Giant(NamedTuple):
    """A model spread over data-parallel ranks, ``over`` of which share out its experts."""

    name: str
    config: tuple[int, int, int, int, int, int] | tuple[int, int, int, int, int, int, bool]
    experts: int = 0  # in a layer
    chosen: int = 0  # by a token
    over: int = 1

    @property
    def label(self) -> str:
        return f"{self.name}, experts over {self.over}" if self.over > 1 else self.name

    def make(self) -> nn.Module:
        """The module, in bf16 on "meta"; a rank's own experts alone."""
        meta = torch.device("meta")
        if not self.experts:
            return llama(self.config, torch.bfloat16, meta)  # type: ignore[arg-type]
        vocab, width, inner, layers, heads, groups = self.config[:6]
        config = transformers.MixtralConfig(
            vocab_size=vocab,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            num_local_experts=self.experts,
            num_experts_per_tok=self.chosen,
            use_cache=False,
        )
        with meta:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for stack in (m for name, m in model.named_modules() if is_expert(name)):
            for key, p in list(stack.named_parameters(recurse=False)):
                own = p.new_empty(len(p) // self.over, *p.shape[1:])
                setattr(stack, key, nn.Parameter(own))
        return model

    def worlds(self, model: nn.Module, ranks: int) -> dict[str, int]:
        """How many of ``ranks`` ranks share each parameter."""
        return {
            name: ranks // self.over if is_expert(name) else ranks
            for name, _ in model.named_parameters()
        }

    def work(self, model: nn.Module) -> float:
        """Parameters that a rank computes with for one of its tokens, on average."""
        own = self.chosen * self.over / self.experts if self.experts else 1
        return sum(p.numel() * (own if is_expert(n) else 1) for n, p in model.named_parameters())


GIANTS = [
    Giant("Llama-70B", KNOWN["llama-70b"]),
    # As mistralai/Mixtral-8x22B-v0.1's config.json says.
    Giant("Mixtral-8x22B", (32000, 6144, 16384, 56, 48, 8), 8, 2),
    Giant("Mixtral-8x22B", (32000, 6144, 16384, 56, 48, 8), 8, 2, over=8),
]


def is_expert(name: str) -> bool:
    """Whether a parameter, or the module of that name, holds experts."""
    return "experts" in name.split(".")


def backward(model: nn.Module) -> None:
    """Runs a model on "meta" forward and backward."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    # Given, for Hugging Face makes one by looking at values.
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bfloat16, device="meta")
    model(input_ids=tokens, labels=tokens, attention_mask=mask).loss.backward()


def buckets(giant: Giant, model: nn.Module, ranks: int, size: int, stage: int) -> list[Bucket]:
    """The buckets of a step in the order they fill, without rounds: those of each group its own."""
    worlds = giant.worlds(model, ranks)
    found = [
        bucket
        for world in sorted(set(worlds.values()))
        for bucket in reduced(
            model, backward, lambda n, world=world: worlds[n] == world, world, size, stage
        )
    ]
    return sorted(found, key=lambda bucket: bucket.place)


def steps(rule: Rule, found: Sequence[Bucket]) -> list[list[Bucket]]:
    """A first and a second step with their rounds, and at the end the sum of the norm."""
    norm = Bucket(max(b.ranks for b in found), (), found[-1].place, (), (), (NORM,), ())
    both = zip(*(rule.of(bucket) for bucket in found), strict=True)
    return [[*step, norm] for step in both]
