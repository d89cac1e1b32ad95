"""The way down: the cheapest steps, in order, until a plan fits the memory of a card."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ds_ext.backward.gradient_config import BUCKET_SIZE
from ds_ext.config import optimizer_names
from ds_ext.config.parsing import lookup
from ds_ext.errors import raise_all
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.memory_plan import GIB, MemoryPlan
from ds_ext.planner.options import (
    ALL,
    BUCKET,
    CHUNKED_LOSS,
    OFFLOADS,
    SPLITS,
    STAGE,
    WEIGHT_STORAGE,
    PlanOptions,
)
from ds_ext.rates import RATES, Rate

# The optimizers to try after AdamW, and what each costs. The last one has next to no state.
OPTIMIZERS = {"FlashAdamW": "8-bit moments", "AdaLomo": "has its own learning rate"}


class MemoryStep(NamedTuple):
    """A change of the config of a plan that needs less memory."""

    name: str
    cost: str
    changes: Mapping[str, Any]  # by dotted key
    is_last: bool = False  # excludes later steps, so it is taken only if the plan then fits


class ResourceUse(NamedTuple):
    """The plan after a step."""

    step: MemoryStep
    options: PlanOptions
    use: MemoryUse


def check(options: PlanOptions) -> None:
    """Raises ValueError for options of ``plan`` that ``--fit`` does not support."""
    is_plain = options.stages == [None]
    others = {"--plot": options.picture, "--config": options.file, "--stage none": is_plain}
    problems = [
        f"--fit does not take {option}: remove it. It writes the config of a DeepSpeed run."
        for option, given in others.items()
        if given
    ]
    if options.batch is None or len(options.cards) != 1:
        problems.append("--fit: add --seq TOKENS, and --memory with one number of GiB.")
    raise_all(problems)


def cheapest_reductions(options: PlanOptions) -> tuple[MemoryPlan, list[ResourceUse]]:
    """Returns the plan, and its memory at first and after each step. The last one fits.

    Steps are tried in the order of ``_steps``. Steps that save nothing, and steps that the model or
    the optimizer does not support, are left out. When the plan fits, earlier steps that are no
    longer needed are removed, the most expensive ones first.

    The ``options`` have a micro-batch and one card. ValueError if no steps suffice.
    """
    card = options.cards[0] * GIB
    first = "AdamW" if options.has_all_optimizers else options.optimizers[0].__name__
    stage = lookup(options.config, STAGE, 3)
    start = options.edited({"optimizer": _optimizer(first, options), STAGE: stage})
    plan = MemoryPlan(start)

    @functools.cache
    def after(*names: str) -> ResourceUse:
        """The plan after some of the steps."""
        now, last = start, MemoryStep(next(iter(plan.rows(start))), "", {})
        for last in (steps[name] for name in names):
            now = now.edited(last.changes)
        ours = next(iter(plan.rows(now).values()))  # AdamW's is the second row
        return ResourceUse(last, now, plan.total(ours, now.batch))

    steps = {step.name: step for step in _steps(options)}
    taken: tuple[str, ...] = ()
    least = after()
    for name, step in steps.items():
        if least.use.total <= card:
            break
        try:
            smaller = after(*taken, name)
        except ValueError:  # the model or the optimizer does not support it
            continue
        fits = smaller.use.total <= card
        if smaller.use.total < least.use.total and (fits or not step.is_last):
            taken, least = (*taken, name), smaller
    if least.use.total > card:
        raise ValueError(
            f"--fit: nothing fits {options.cards[0]:g} GiB. The smallest total is "
            f"{least.use.total / GIB:.3g} GiB per rank: give more --ranks, "
            f"{'--stage 3, ' * (stage != 3)}a smaller --model or --seq, or fewer --batch rows."
        )
    for name in reversed(taken[:-1]):
        fewer = tuple(other for other in taken if other != name)
        if after(*fewer).use.total <= card:
            taken = fewer
    return plan, [after(*taken[:n]) for n in range(len(taken) + 1)]


def _steps(options: PlanOptions) -> Iterator[MemoryStep]:
    """Yields the steps in the order in which they are tried."""
    assert options.batch is not None
    rows, stage = options.batch.rows, lookup(options.config, STAGE, ALL)
    yield MemoryStep("chunked loss", "the output head runs again", {CHUNKED_LOSS: True})
    for n in sorted({*(2**k for k in range(1, rows.bit_length())), max(2, rows)}):
        # Two pieces of one row are one piece, which is checkpointed.
        name = "checkpointing" if rows == 1 else f"layers run {n} pieces of the batch"
        yield MemoryStep(name, "layers run again", {SPLITS: n})
    for name, cost in OPTIMIZERS.items() if options.has_all_optimizers else ():
        yield MemoryStep(name, cost, {"optimizer": _optimizer(name, options)})
    if lookup(options.config, BUCKET) is None:
        smaller = {BUCKET: min(options.bucket, BUCKET_SIZE)}
        name = f"buckets of {BUCKET_SIZE:,} elements"
        yield MemoryStep(name, "more and smaller messages", smaller)
    if stage == ALL:
        least = 2 if options.ranks == 1 else 3
        int8 = {WEIGHT_STORAGE: "int8", STAGE: least}
        yield MemoryStep("weights in int8", "more noise in each update", int8, is_last=True)
    for what, name in {"optimizer": "optimizer states", "param": "weights"}.items():
        if what == "optimizer" or stage in (ALL, 3):
            to_cpu = {OFFLOADS[what]: "cpu"}
            yield MemoryStep(f"{name} in host memory", "moved in each step", to_cpu)


def _optimizer(name: str, options: PlanOptions) -> dict[str, Any]:
    """The section of an optimizer with its recommended params, and those of ``options``."""
    params = {**RATES.get(name.lower(), Rate(0.0)).params, **options.params}
    return {"type": optimizer_names.in_config(name), "params": params}
