"""Steps by native passes that a sanitizer watches: ``python -m tests.common.sanitized``.

A process of its own, in which the sanitizer's library was loaded first. Random optimizers step
random parameters, whose states and data are then edited in random ways: what fits is stepped, and
the rest is refused before it reaches the passes. With ``--plant`` that check is left out.
"""

import argparse
import json
import random
import threading
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ds_ext.ops.executors import table_passes, tables
from ds_ext.ops.executors.native import library, native_table
from ds_ext.ops.runs import Runs
from ds_ext.ops.state import mapped
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer, plans, state_checks
from ds_ext.rules import REGISTRY
from tests.common.hypers import BATCHED, SIMULATED
from tests.common.states import entries

SHAPES = [(), (1,), (5,), (33,), (300,), (1, 7), (7, 1), (16, 16), (13, 29), (70, 110), (3, 5, 9)]
LARGE = (600, 400)  # threads share it
SHAPES += [(31, 9, 1, 1), (4, 3, 2, 5), LARGE]
WAYS = [(torch.float32, "nearest"), (torch.bfloat16, "nearest"), (torch.float16, "nearest")]
WAYS += [(dtype, how) for dtype, _ in WAYS[1:] for how in ("stochastic", "master", "master24")]


def main() -> None:
    """Makes trials, and prints how often what was done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", help="passes.cpp, built with a sanitizer")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true", help="parameters that threads share")
    parser.add_argument("--plant", choices=["size", "race"])
    args = parser.parse_args()
    chance = random.Random(args.seed)
    torch.manual_seed(args.seed)
    done: Counter[str] = Counter()
    built = mock.patch.object(library, "_built", lambda: args.library)
    # The sanitizer does not know torch's operations: they run in one thread, the passes in three.
    torch.set_num_threads(1)
    threads = mock.patch.object(torch, "get_num_threads", lambda: 3)
    with built, threads, mock.patch.object(native_table, "INSTRUCTIONS", 1):
        assert native_table.is_available()
        if args.plant == "race":
            race()
        elif args.plant:
            overrun()
        for _ in range(args.trials):
            trial(chance, done, [LARGE] if args.large else SHAPES)
    print(json.dumps(done))


def trial(chance: random.Random, done: Counter[str], shapes: list[tuple[int, ...]]) -> None:
    """Steps by one optimizer, edited between steps until something is refused."""
    name = chance.choice(BATCHED)
    dtype, how = chance.choice(WAYS)
    params, optimizer = made(chance, name, dtype, how, shapes)
    step(params, optimizer)
    for _ in range(4):
        edit = chance.choice(EDITS)
        before = [p.detach().clone() for p in params]
        try:
            edit(chance, params, optimizer)
            step(params, optimizer)
        except ValueError:
            done[f"refused: {edit.__name__}"] += 1
            same = [p.shape == q.shape and p.equal(q) for p, q in zip(params, before, strict=True)]
            assert all(same) or edit is resize, "a refused step has moved a weight"
            return
        done[f"stepped: {edit.__name__}"] += 1
    done[name] += 1


def made(
    chance: random.Random, name: str, dtype: torch.dtype, how: str, among: list[tuple[int, ...]]
) -> tuple[list[nn.Parameter], RuleOptimizer]:
    """Random parameters and an optimizer of them."""
    shapes = chance.choices(among, k=chance.randrange(1, 7 if len(among) > 1 else 3))
    if not REGISTRY[name].any_shape:
        shapes = [shape for shape in shapes if len(shape) == 2] or [(5, 4)]
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    hypers = dict(SIMULATED[name])
    if name == "lion":
        hypers["nbits"] = chance.choice([8, 32])
    if name == "adafactor":
        hypers["beta1"] = chance.choice([None, 0.9])
    return params, OPTIMIZERS[name](params, **hypers, weight_update=how)


def step(params: list[nn.Parameter], optimizer: RuleOptimizer) -> None:
    for p in params:
        p.grad = torch.randn(p.shape).to(p.dtype)
    optimizer.step()


def changed(chance: random.Random, x: Tensor) -> Tensor:
    """A tensor of another size, dtype or order in memory."""
    size = chance.randrange(0, 2 * x.numel() + 2)
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.int16, torch.int64]
    ways = [torch.zeros(size, dtype=x.dtype), x.to(chance.choice(dtypes))]
    ways += [x.flatten()[: max(1, x.numel() // 2)].clone(), torch.stack([x, x], dim=-1)[..., 0]]
    ways += [torch.zeros((), dtype=x.dtype).expand(x.shape), x.clone()]
    return chance.choice(ways)


def nothing(chance: random.Random, params: list[nn.Parameter], optimizer: RuleOptimizer) -> None:
    """Changes nothing."""


def edit(chance: random.Random, params: list[nn.Parameter], optimizer: RuleOptimizer) -> None:
    """Puts another tensor into a state, or other data into its tensor, or takes it out."""
    found = [entry for p in params for entry in entries(optimizer.state[p])]
    if found:
        (*_, key), state, x = chance.choice(found)
        way = chance.randrange(3)
        if way == 0:
            del state[key]
        elif way == 1:
            state[key] = changed(chance, x)
        else:
            x.data = changed(chance, x)


def load(chance: random.Random, params: list[nn.Parameter], optimizer: RuleOptimizer) -> None:
    """Loads a state in which a tensor was changed."""
    saved = optimizer.state_dict()
    saved["state"] = mapped(saved["state"], lambda x: x)  # dicts of their own
    found = [*entries(saved["state"])]
    if found:
        (*_, key), state, x = chance.choice(found)
        state[key] = changed(chance, x)
    optimizer.load_state_dict(saved)


def cast(chance: random.Random, params: list[nn.Parameter], optimizer: RuleOptimizer) -> None:
    for p in chance.sample(params, chance.randrange(len(params) + 1)):
        dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
        p.grad, p.data = None, p.data.to(chance.choice(dtypes))


def resize(chance: random.Random, params: list[nn.Parameter], optimizer: RuleOptimizer) -> None:
    """Gives a parameter data of another shape."""
    p = chance.choice(params)
    p.grad, p.data = None, torch.randn([n + chance.randrange(-1, 3) for n in p.shape]).to(p.dtype)


EDITS = [nothing, edit, edit, load, load, cast, resize]


def overrun() -> None:
    """Steps with a state that is too short, which nobody checks."""
    params = [nn.Parameter(torch.randn(40, 30))]
    optimizer = OPTIMIZERS["adamw"](params)
    step(params, optimizer)
    optimizer.state[params[0]]["m"] = torch.zeros(1199)

    def unchecked(x: Any, *_: Any) -> Any:
        return Runs([x]) if isinstance(x, Tensor) else x

    with (
        mock.patch.object(plans.BatchPlan, "fits", lambda *_: True),
        mock.patch.object(state_checks, "check", lambda *_: None),
        mock.patch.object(tables, "checked", unchecked),
        mock.patch.object(table_passes, "checked", unchecked),
    ):
        step(params, optimizer)


def race() -> None:
    """Steps one parameter in two threads at once."""
    param = nn.Parameter(torch.randn(600, 400))
    param.grad = torch.randn(600, 400)
    both = [OPTIMIZERS["lomo"]([param]) for _ in range(2)]
    for _ in range(20):
        steps = [threading.Thread(target=optimizer.step) for optimizer in both]
        for thread in steps:
            thread.start()
        for thread in steps:
            thread.join()


if __name__ == "__main__":
    main()
