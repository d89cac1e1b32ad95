"""The models of ``scale``: Hugging Face's own modules in their true shapes, without storage."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import transformers
from torch import nn

from benchmarks.counting import NORM, Bucket, Rule, reduced
from benchmarks.memory import Sizes, config_keys, llama
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner import memory

# What is stepped by, and whether in its first step, where GaLore makes its basis.
STEPS = {cls.__name__: (name, False) for name, cls in OPTIMIZERS.items()} | {
    "GaLoreAdamW, renewing": ("galoreadamw", True)
}
TOKENS = 8  # of the pass that gives the gradients' order; their number changes no size


class Giant(NamedTuple):
    """A model spread over data-parallel ranks, ``over`` of which share out its experts."""

    sizes: Sizes  # as benchmarks.memory's
    experts: int = 0  # in a layer
    chosen: int = 0  # by a token
    over: int = 1

    def make(self) -> nn.Module:
        """The module, in bf16 on "meta"; a rank's own experts alone."""
        meta = torch.device("meta")
        if not self.experts:
            return llama(self.sizes, torch.bfloat16, meta)
        config = transformers.MixtralConfig(
            **config_keys(self.sizes),
            num_local_experts=self.experts,
            num_experts_per_tok=self.chosen,
        )
        with meta:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        stacks = [m for name, m in model.named_modules() if name.endswith("experts")]
        for stack in stacks:
            for key, p in list(stack.named_parameters(recurse=False)):
                own = p.new_empty(len(p) // self.over, *p.shape[1:])
                setattr(stack, key, nn.Parameter(own))
            stack.num_experts = self.experts // self.over  # type: ignore[assignment]
        return model

    def worlds(self, model: nn.Module, ranks: int) -> dict[str, int]:
        """How many of ``ranks`` ranks share each parameter."""
        return {
            name: ranks // self.over if is_expert(name) else ranks
            for name, _ in model.named_parameters()
        }

    def work(self, model: nn.Module) -> dict[str, float]:
        """Elements of each parameter that a rank computes with for one of its tokens."""
        own = self.chosen * self.over / self.experts if self.experts else 1.0
        return {n: p.numel() * (own if is_expert(n) else 1.0) for n, p in model.named_parameters()}


# As mistralai/Mixtral-8x22B-v0.1's config.json says.
MIXTRAL = (32000, 6144, 16384, 56, 48, 8, False)
MODELS = {
    "llama-70b": Giant((32000, 8192, 28672, 80, 64, 8, False)),
    "8x22b": Giant(MIXTRAL, experts=8, chosen=2),
    "8x22b, EP 8": Giant(MIXTRAL, experts=8, chosen=2, over=8),
}


def is_expert(name: str) -> bool:
    """Whether a parameter, or the module of that name, holds experts."""
    return "experts" in name.split(".")


def backward(model: nn.Module, device: str = "meta") -> None:
    """Runs a model on "meta" forward and backward, or one of fake tensors on another device."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device=device)
    # Given, for Hugging Face makes one by looking at values.
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=dtype, device=device)
    model(input_ids=tokens, labels=tokens, attention_mask=mask).loss.backward()


def arrivals(model: nn.Module) -> list[str]:
    """Names of the parameters in the order in which a backward pass brings their gradients."""
    found: list[str] = []

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            param.grad = None
            found.append(name)

        return hook

    named = model.named_parameters()
    hooks = [p.register_post_accumulate_grad_hook(noting(name)) for name, p in named]
    backward(model)
    for hook in hooks:
        hook.remove()
    return found


def in_order(order: Sequence[str], model: nn.Module) -> None:
    """A backward pass, of next to no work, that brings gradients in this order.

    Each parameter is added to what the later ones were added to before it.
    """
    params = dict(model.named_parameters())
    total = torch.zeros((), dtype=params[order[0]].dtype, device="meta")
    for name in reversed(order):
        total = total + params[name].sum()
    total.backward()


@dataclass(frozen=True)
class Counted:
    """A model among some ranks at a bucket size and ZeRO stage: what each kind of step sends."""

    name: str  # of MODELS
    ranks: int
    size: int
    stage: int = 3

    def step(self, kind: str) -> list[Bucket]:
        """The buckets of a step of one of STEPS."""
        optimizer, is_first = STEPS[kind]
        return _steps(self, optimizer)[0 if is_first else 1]

    def state(self, kind: str) -> int:
        """Bytes of state of the rank that has most."""
        return _state(self.name, self.ranks, STEPS[kind][0])

    def rule(self, optimizer: str) -> Rule:
        """An optimizer's rules for what each rank owns."""
        return made(self.name)[1][optimizer]

    def buckets(self) -> list[Bucket]:
        """What is sent in order, without the rounds of rules; at the end the sum of the norm."""
        found = _buckets(self)
        return [*found, Bucket(self.ranks, (), found[-1].place, (), (), (NORM,), ())]

    def ready(self, step: Sequence[Bucket], second: float) -> list[float]:
        """When the gradients of each bucket have been computed.

        ``second`` is how long a forward pass takes for one element of all tokens of a rank; a
        backward pass takes two.
        """
        work = MODELS[self.name].work(made(self.name)[0])
        done, found = 0.0, []
        for bucket in step:
            done += sum(work[name] for name in bucket.params)
            found.append(second * (sum(work.values()) + 2 * done))
        return found

    @property
    def in_flight(self) -> float:
        """Bytes of gradients that a rank holds at a time."""
        model, _ = made(self.name)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        lomo = OPTIMIZERS["lomo"].hypers()
        return memory.ours(lomo, shapes, 3, self.ranks, torch.bfloat16, self.size).gradients


@functools.cache
def made(name: str) -> tuple[nn.Module, dict[str, Rule]]:
    """A model without storage, and all rules for it."""
    model = MODELS[name].make()
    return model, {optimizer: Rule(optimizer, model) for optimizer in OPTIMIZERS}


@functools.cache
def order(name: str) -> list[str]:
    """Names of a model's parameters in the order in which their gradients come."""
    return arrivals(made(name)[0])


@functools.cache
def _buckets(counted: Counted) -> list[Bucket]:
    """The buckets in the order they fill, without rounds; those of each group are its own."""
    model, _ = made(counted.name)
    worlds = MODELS[counted.name].worlds(model, counted.ranks)
    pass_ = functools.partial(in_order, order(counted.name))
    found = []
    for world in sorted(set(worlds.values())):
        shared = {name for name, ranks in worlds.items() if ranks == world}
        found += reduced(model, pass_, shared, world, counted.size, counted.stage)
    return sorted(found, key=lambda bucket: bucket.place)


@functools.cache
def _steps(counted: Counted, optimizer: str) -> list[list[Bucket]]:
    """A first and a second step with their rounds."""
    rule = counted.rule(optimizer)
    both = zip(*(rule.of(bucket) for bucket in counted.buckets()), strict=True)
    return [list(step) for step in both]


@functools.cache
def _state(name: str, ranks: int, optimizer: str) -> int:
    model, rules = made(name)
    return rules[optimizer].state_bytes(MODELS[name].worlds(model, ranks), ranks)
