"""The way down: the cheapest steps, in order, until a plan fits the memory of a card."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ds_ext.backward.gradient_config import BUCKET_SIZE
from ds_ext.optimizer import named
from ds_ext.planner.memory import MemoryUse
from ds_ext.planner.options import ALL, PlanOptions
from ds_ext.planner.rows import GIB, MemoryPlan
from ds_ext.rates import RATES, Rate

# The optimizers to try in turn. The second makes the first one's steps in less memory. The third
# has next to no state.
OPTIMIZERS = ("AdamW", "FlashAdamW", "AdaLomo")

_REMEDIES = {
    "weights": "give more --ranks, or a smaller --model",
    "state": "give more --ranks, or remove --optimizer",
    "gradients": "give a smaller --bucket, or a --model with smaller matrices",
    "master": "give more --ranks, or another weight_update in --params",
    "activations": "give a smaller --seq, or fewer --batch rows",
}


@dataclass(frozen=True)
class MemoryStep:
    """A change of the options of a plan that needs less memory."""

    name: str
    cost: str
    change: Callable[[PlanOptions], PlanOptions]
    is_last: bool = False  # excludes later steps, so it is taken only if the plan then fits


@dataclass(frozen=True)
class ResourceUse:
    """The plan after a step."""

    name: str
    cost: str
    options: PlanOptions
    use: MemoryUse


def unsupported(options: PlanOptions) -> str | None:
    """Returns an option of ``plan`` that ``--fit`` does not support, or None."""
    found = {
        "--lora": options.lora is not None,
        "--plot": options.picture is not None,
        "--stage none": options.stage == "none",
        "--config": options.has_config,
    }
    if options.model is None or options.batch is None or len(options.cards) != 1:
        return ""
    return next((option for option, is_given in found.items() if is_given), None)


def check(options: PlanOptions) -> None:
    """Raises ValueError for options of ``plan`` that ``--fit`` does not support."""
    option = unsupported(options)
    if option == "":
        raise ValueError("--fit: add --model, --seq TOKENS, and --memory with one number of GiB.")
    if option is not None:
        raise ValueError(
            f"--fit writes the config of one DeepSpeed run without {option}: remove it."
        )


def cheapest_reductions(
    options: PlanOptions, peaks: MemoryPlan | None = None
) -> tuple[MemoryPlan, list[ResourceUse]]:
    """Returns the plan, and its memory at first and after each step. The last one fits.

    Steps are tried in the order of ``_steps``. Steps that save nothing, and steps that the model or
    the optimizer does not support, are left out. When the plan fits, earlier steps that are no
    longer needed are removed, the most expensive ones first.

    Args:
        options: the options, with a model, a micro-batch and one card.
        peaks: a plan of the same model and dtype, whose activations are known.

    Raises:
        ValueError: no steps suffice, or the plan cannot be made.
    """
    assert options.model is not None
    card = options.cards[0] * GIB
    first = OPTIMIZERS[0] if options.optimizer == ALL else options.optimizer
    start = _with_optimizer(first, options, replace(options, stage=options.stage or "3"))
    plan = MemoryPlan(start, options.model) if peaks is None else peaks.changed(start)

    @functools.cache
    def use(now: tuple[MemoryStep, ...]) -> MemoryUse:
        changed = plan.changed(_applied(now, start))
        return changed.total(changed.rows[0], changed.options.batch)

    taken: tuple[MemoryStep, ...] = ()
    least = use(taken)
    for step in _steps(options):
        if least.total <= card:
            break
        try:
            smaller = use((*taken, step))
        except ValueError:  # the model or the optimizer does not support it
            continue
        if smaller.total < least.total and (smaller.total <= card or not step.is_last):
            taken, least = (*taken, step), smaller
    if least.total > card:
        raise ValueError(_nothing_fits(_applied(taken, start), least))
    for step in reversed(taken[:-1]):
        fewer = tuple(other for other in taken if other is not step)
        if use(fewer).total <= card:
            taken = fewer
    found = [ResourceUse(plan.rows[0].label, "", start, use(()))]
    for n, step in enumerate(taken, 1):
        now = taken[:n]
        found.append(ResourceUse(step.name, step.cost, _applied(now, start), use(now)))
    return plan, found


def _steps(options: PlanOptions) -> Iterator[MemoryStep]:
    """Yields the steps in the order in which they are tried."""
    assert options.batch is not None
    rows = options.batch.rows
    yield MemoryStep("chunked loss", "the output head runs again", _in_chunks)
    for n in sorted({*(2**k for k in range(1, rows.bit_length())), max(2, rows)}):
        yield MemoryStep(
            "checkpointing" if rows == 1 else f"layers run {n} pieces of the batch",
            "layers run again",
            functools.partial(_in_pieces, n),
        )
    if options.optimizer == ALL:
        for name in OPTIMIZERS[1:]:
            change = functools.partial(_with_optimizer, name, options)
            yield MemoryStep(name, "has its own learning rate", change)
    if not options.chose_bucket:
        yield MemoryStep(
            f"buckets of {BUCKET_SIZE:,} elements",
            "more and smaller messages",
            lambda now: replace(now, bucket=min(now.bucket, BUCKET_SIZE)),
        )
    if options.stage is None:
        stage = "2" if options.ranks == 1 else "3"
        yield MemoryStep(
            "weights in int8",
            "more noise in each update",
            lambda now: replace(now, weight_storage="int8", stage=stage),
            is_last=True,
        )
    bus = "moved in each step"
    yield MemoryStep(
        "optimizer states in host memory", bus, lambda now: replace(now, offload_optimizer=True)
    )
    if options.stage in (None, "3"):
        yield MemoryStep(
            "weights in host memory", bus, lambda now: replace(now, offload_param=True)
        )


def _in_chunks(now: PlanOptions) -> PlanOptions:
    """``now`` with a chunked loss."""
    assert now.batch is not None
    return replace(now, batch=replace(now.batch, chunked_loss=True))


def _in_pieces(n: int, now: PlanOptions) -> PlanOptions:
    """``now`` with layers in pieces. Two pieces of one row are one piece, which is checkpointed."""
    assert now.batch is not None
    return replace(now, batch=replace(now.batch, splits=n))


def _with_optimizer(name: str, options: PlanOptions, now: PlanOptions) -> PlanOptions:
    """``now`` with an optimizer, its recommended params, and those of ``options``."""
    rate = RATES.get(named(name, options.spelled("optimizer")).__name__.lower(), Rate(0.0))
    return replace(now, optimizer=name, params={**rate.params, **options.params})


def _applied(steps: Sequence[MemoryStep], start: PlanOptions) -> PlanOptions:
    return functools.reduce(lambda now, step: step.change(now), steps, start)


def _nothing_fits(options: PlanOptions, least: MemoryUse) -> str:
    """The error if all steps together do not suffice."""
    part = max(_REMEDIES, key=lambda part: float(getattr(least, part)))
    remedy = _REMEDIES[part] if options.stage == "3" else "try --stage 3"
    return (
        f"--fit: nothing fits {options.cards[0]:g} GiB. The smallest total is "
        f"{least.total / GIB:.3g} GiB per rank; the largest part is {part}, "
        f"{getattr(least, part) / GIB:.3g} GiB: {remedy}."
    )
