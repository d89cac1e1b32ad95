"""The models of ``scale``: Hugging Face modules in their real shapes, without storage."""

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

# The optimizer, and whether it is its first step, in which GaLore computes its basis.
STEPS = {cls.__name__: (name, False) for name, cls in OPTIMIZERS.items()} | {
    "GaLoreAdamW, renewing": ("galoreadamw", True)
}
TOKENS = 8  # of the pass that finds the order of gradients; no size depends on it


class Giant(NamedTuple):
    """A model for data-parallel ranks. Its experts are divided among ``over`` of them."""

    sizes: Sizes  # see benchmarks.memory
    experts: int = 0  # per layer
    chosen: int = 0  # experts per token
    over: int = 1

    def make(self) -> nn.Module:
        """Returns the module in bf16 on "meta", with only the experts of one rank."""
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
        """Returns the number of ranks that share each parameter."""
        return {
            name: ranks // self.over if is_expert(name) else ranks
            for name, _ in model.named_parameters()
        }

    def work(self, model: nn.Module) -> dict[str, float]:
        """Returns the elements of each parameter that a rank uses for one of its tokens."""
        own = self.chosen * self.over / self.experts if self.experts else 1.0
        return {n: p.numel() * (own if is_expert(n) else 1.0) for n, p in model.named_parameters()}


# From the config.json of mistralai/Mixtral-8x22B-v0.1.
MIXTRAL = (32000, 6144, 16384, 56, 48, 8, False)
MODELS = {
    "llama-70b": Giant((32000, 8192, 28672, 80, 64, 8, False)),
    "8x22b": Giant(MIXTRAL, experts=8, chosen=2),
    "8x22b, EP 8": Giant(MIXTRAL, experts=8, chosen=2, over=8),
}


def is_expert(name: str) -> bool:
    """Returns whether a parameter or module with this name belongs to an expert."""
    return "experts" in name.split(".")


def backward(model: nn.Module, device: str = "meta") -> None:
    """Runs forward and backward of a model on "meta", or of fake tensors on another device."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device=device)
    # Hugging Face would compute the mask from values.
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=dtype, device=device)
    model(input_ids=tokens, labels=tokens, attention_mask=mask).loss.backward()


def arrivals(model: nn.Module) -> list[str]:
    """Returns the parameter names in the order in which backward computes their gradients."""
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
    """Runs a cheap backward pass that computes gradients in the given order.

    The parameters are added to a sum in reverse order.
    """
    params = dict(model.named_parameters())
    total = torch.zeros((), dtype=params[order[0]].dtype, device="meta")
    for name in reversed(order):
        total = total + params[name].sum()
    total.backward()


@dataclass(frozen=True)
class Counted:
    """A model with a number of ranks, bucket size and ZeRO stage; counts its steps."""

    name: str  # a key of MODELS
    ranks: int
    size: int
    stage: int = 3

    def step(self, kind: str) -> list[Bucket]:
        """Returns the buckets of a step of one kind in STEPS."""
        optimizer, is_first = STEPS[kind]
        return _steps(self, optimizer)[0 if is_first else 1]

    def state(self, kind: str) -> int:
        """Returns the state bytes of the rank with the most state."""
        return _state(self.name, self.ranks, STEPS[kind][0])

    def rule(self, optimizer: str) -> Rule:
        """Returns an optimizer's rules for the part that each rank owns."""
        return made(self.name)[1][optimizer]

    def buckets(self) -> list[Bucket]:
        """Returns the buckets in order, without the rules' rounds. The last one sums the norm."""
        found = _buckets(self)
        return [*found, Bucket(self.ranks, (), found[-1].place, (), (), (NORM,), ())]

    def ready(self, step: Sequence[Bucket], second: float) -> list[float]:
        """Returns the time at which the gradients of each bucket have been computed.

        ``second`` is the time of a forward pass per element, for all tokens of a rank. A backward
        pass takes twice as long.
        """
        work = MODELS[self.name].work(made(self.name)[0])
        done, found = 0.0, []
        for bucket in step:
            done += sum(work[name] for name in bucket.params)
            found.append(second * (sum(work.values()) + 2 * done))
        return found

    @property
    def in_flight(self) -> float:
        """The bytes of gradients that a rank holds at the same time."""
        model, _ = made(self.name)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        lomo = OPTIMIZERS["lomo"].hypers()
        return memory.optimizer_memory(
            lomo, shapes, 3, self.ranks, torch.bfloat16, self.size
        ).gradients


@functools.cache
def made(name: str) -> tuple[nn.Module, dict[str, Rule]]:
    """Returns a model without storage, and the rules of all optimizers for it."""
    model = MODELS[name].make()
    return model, {optimizer: Rule(optimizer, model) for optimizer in OPTIMIZERS}


@functools.cache
def order(name: str) -> list[str]:
    """Returns a model's parameter names in the order in which their gradients arrive."""
    return arrivals(made(name)[0])


@functools.cache
def _buckets(counted: Counted) -> list[Bucket]:
    """The buckets in the order in which they fill. Each process group has its own buckets."""
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
    """The first and the second step, with the rules' rounds."""
    rule = counted.rule(optimizer)
    both = zip(*(rule.of(bucket) for bucket in counted.buckets()), strict=True)
    return [list(step) for step in both]


@functools.cache
def _state(name: str, ranks: int, optimizer: str) -> int:
    model, rules = made(name)
    return rules[optimizer].state_bytes(MODELS[name].worlds(model, ranks), ranks)
