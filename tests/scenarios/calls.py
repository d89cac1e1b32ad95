"""The calls of a sequence. Each is made on both sides, and takes what it chooses from a seed."""

import copy
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.common.states import tensors
from tests.scenarios.sides import KINDS, Net, Side, walk

if TYPE_CHECKING:
    from tests.scenarios.driver import Pair

ALONE = ("plain", "fused")
ALL = ("plain", "fused", "replicas", "fsdp2", "engine")
NAMES = [name for name, _ in Net(2).named_parameters()]


class Call(NamedTuple):
    """What a call does to a pair, how often it is made, in which ways, and whether it may fail."""

    make: Callable[["Pair", random.Random], None]
    weight: int
    ways: tuple[str, ...]
    is_refusable: bool


CALLS: dict[str, Call] = {}


def call(weight: int, ways: tuple[str, ...] = ALL, refusable: bool = False):
    """Registers what is made of several parts, each on both sides."""

    def register(make: Callable[["Pair", random.Random], None]):
        CALLS[make.__name__] = Call(make, weight, ways, refusable)
        return make

    return register


def edit(weight: int, ways: tuple[str, ...] = ALL, refusable: bool = False):
    """Registers what is done to each side at once."""

    def register(change: Callable[[Any, random.Random], None]):
        def make(pair: "Pair", draw: random.Random) -> None:
            seed = draw.random()
            pair.do(lambda side: change(side, random.Random(seed)))

        CALLS[change.__name__] = Call(make, weight, ways, refusable)

    return register


def steps_with(
    weight: int, name: str, ways: tuple[str, ...] = ALL, refusable: bool = False, **how: Any
) -> None:
    """Registers a step by a loss that is made as ``how`` says."""
    CALLS[name] = Call(lambda pair, draw: pair.train(draw, **how), weight, ways, refusable)


@call(30)
def steps(pair, draw):
    for _ in range(draw.choice([1, 1, 2, 3])):
        pair.train(draw)


steps_with(0, "one_step")  # which no sequence draws
steps_with(5, "two_forward_passes", forwards=2)


@call(3, ("fused", "replicas", "engine"))
def forward_passes_ahead(pair, draw):
    """All forward passes of a step come before its backward passes."""
    seed, passes = draw.randrange(10**6), range(pair.setup["accumulation"])
    if (pair.way, pair.setup["stage"]) == ("engine", 3):  # where DeepSpeed follows one pass
        return

    def step(side: Side) -> None:
        for loss in [side.loss(seed + 10 * micro) for micro in passes]:
            side.backward(loss)
            side.step()

    pair.do(step)
    pair.compare()


@call(3, ("engine",), refusable=True)
def backward_of_the_loss_itself(pair, draw):
    """Of two forward passes, by ``loss.backward()``; what is measured first is refused."""
    seed = draw.randrange(10**6)
    for micro in range(pair.setup["accumulation"]):

        def backward(side: Side, number: int = seed + 10 * micro) -> None:
            loss = side.loss(number, forwards=2)
            loss.backward() if side is pair.subject else side.backward(loss)

        if not (pair.do(backward) and pair.do(lambda s: s.step())):
            break
    pair.compare()


@call(3, refusable=True)
def two_backward_passes(pair, draw):
    # torch's FSDP2 cannot go on after an error within its backward pass.
    if (pair.way, pair.setup["policy"]) != ("fsdp2", "fused"):
        pair.train(draw, passes=2)


@call(3, ALONE, refusable=True)
def two_backward_passes_of_one_forward(pair, draw):
    seed = draw.randrange(10**6)
    if pair.setup["accumulation"] == 1:
        both = [lambda s: s.begin(seed), lambda s: s.backward(s.graph * 2), lambda s: s.step()]
        all(map(pair.do, both))
        pair.subject.graph = pair.reference.graph = None  # it knows the shapes of the weights
        pair.compare()


steps_with(3, "selective_checkpointing", how="selective")


@call(5)
def head_beside(pair, draw):
    pair.train(draw, head=True)
    pair.do(lambda s: s.step_heads())


# In inference mode, between the forward and the backward pass.
steps_with(3, "another_model_scored", scores=True)


@call(3, ALONE, refusable=True)
def clipped_with_head(pair, draw):
    """By one norm of the model's gradients and of those of a head, which torch steps."""
    seed = draw.randrange(10**6)
    if pair.setup["accumulation"] > 1:
        return
    if pair.do(lambda s: s.backward(s.loss(seed, head=True))) and pair.do(lambda s: s.clip_both()):
        pair.do(lambda s: s.step())
    pair.compare()
    pair.do(lambda s: s.step_heads())


steps_with(3, "inputs_with_gradients", inputs=True)
steps_with(3, "gradient_penalty", ("plain", "fused", "replicas", "engine"), True, penalty=True)


@call(3, ALL[1:])
def nan_gradient(pair, draw):
    """Of one rank."""
    pair.train(draw, how="" if pair.setup["policy"] == "plain" else "poisoned")


@call(3)
def scheduler(pair, draw):
    gamma = draw.uniform(0.5, 0.9)
    pair.do(lambda s: s.schedule(gamma))
    for _ in range(2):
        pair.train(draw)
        pair.do(lambda s: s.scheduler.step())


@call(6)
def discarded_batch(pair, draw):
    seed = draw.randrange(10**6)
    for micro in range(draw.randrange(pair.setup["accumulation"])):
        pair.do(lambda s, n=seed + micro: s.backward(s.loss(n))) and pair.do(lambda s: s.step())
    hows = ["forward", "backward", "failed backward", "failed forward"]
    if pair.way == "fsdp2":  # torch's FSDP2 and DeepSpeed's stage 3 cannot go on after the others
        hows = hows[:2]
    elif pair.way == "engine" and pair.setup["stage"] == 3:
        hows = hows[:3]
    for how in hows:
        pair.do(lambda s, how=how: s.discard(seed + 9, how))
        pair.compare()


@call(4)
def some_gradients_discarded(pair, draw):
    if pair.setup["clip"] != "previous":  # whose next norm depends on what was not stepped yet
        pair.train(draw, drops=draw.sample(NAMES, draw.randint(1, len(NAMES))))


@call(3, ALONE)
def closure(pair, draw):
    seed = draw.randrange(10**6)

    def step(side: Side) -> None:
        @torch.enable_grad()
        def run() -> Tensor:
            side.zero_grad()
            loss = side.loss(seed)
            side.backward(loss)
            return loss

        side.optimizer.step(run)
        side.zero_grad()

    if pair.setup["accumulation"] == 1 and pair.setup["clip"] == "none":
        pair.do(step)
        pair.compare()


def chosen(side: Side, draw: random.Random) -> tuple[list[dict[str, Any]], int]:
    groups = side.optimizer.param_groups
    return groups, draw.randrange(len(groups))


def located(side: Side, name: str) -> list[Any]:
    """The list of ``params`` that has a parameter; an empty one if none has."""
    return next((x for x in side.lists() if any(p is side.param(name) for p in x)), [])


@edit(6)
def hyper_parameters(side, draw):
    groups, i = chosen(side, draw)
    groups[i]["lr"] *= draw.uniform(0.5, 1.5)
    groups[i]["weight_decay"] = draw.choice([0.0, 0.1, 0.3])


@edit(6)
def parameter_taken_out_or_moved(side, draw):
    groups, i = chosen(side, draw)
    name, moves = draw.choice(NAMES), draw.choice([True, False])
    params = located(side, name)
    if len(params) > 1:
        params[:] = [p for p in params if p is not side.param(name)]
        if moves:
            groups[i]["params"].append(side.param(name))


@edit(4)
def group_added(side, draw):
    missing = [side.param(n) for n in NAMES if not located(side, n)]
    if missing:
        side.optimizer.add_param_group({"params": missing, "lr": draw.uniform(0.002, 0.03)})


@edit(3)
def group_removed(side, draw):
    groups, i = chosen(side, draw)
    if len(groups) > 1:
        del groups[i]


@edit(4)
def group_replaced(side, draw):
    groups, i = chosen(side, draw)
    groups[i] = {**groups[i], "lr": draw.uniform(0.002, 0.03)}


@edit(5)
def frozen_or_not(side, draw):
    for name in draw.sample(NAMES, draw.choice([1, 2])):
        p = side.param(name)
        others = [
            n for n in NAMES if n != name and side.param(n).requires_grad and located(side, n)
        ]
        if others or not p.requires_grad:
            p.requires_grad_(not p.requires_grad)


@edit(5)
def edited_weight(side, draw):
    name, factor = draw.choice(NAMES), draw.uniform(0.5, 1.5)
    hows = ["in place", "data in place", "data", "transposed"]
    how, p = draw.choice(hows if side.setup["way"] in ALONE else hows[:2]), side.param(name)
    with torch.no_grad(), side.editable(p):
        if how == "transposed":
            p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)
        elif how == "data":
            p.data = p.data * factor
        else:
            (p if how == "in place" else p.data).mul_(factor)


@call(2, ALONE, refusable=True)
def resized(pair, draw):
    rows, name, side = draw.choice([5, 12, 40]), "embed.weight", pair.subject
    is_trained = any(located(side, n) and side.param(n).requires_grad for n in NAMES)
    if pair.has_failed_in_hooks or not is_trained:
        return
    pair.do(lambda s: s.resize(rows))
    pair.compare()
    is_stepped = located(pair.subject, name) and pair.subject.param(name).requires_grad
    if not pair.train(draw) or not is_stepped:  # a state of the old shape would wait for it
        pair.adopt()


@call(2, ALONE)
def there_and_back(pair, draw):
    """Casts, with steps at the other precision."""
    own = getattr(torch, pair.setup["dtype"])
    pair.tolerance = max(pair.tolerance, 1e-5)
    if pair.do(lambda s: s.cast(torch.double if own == torch.float else torch.float)):
        steps(pair, draw)
        pair.do(lambda s: s.cast(own))


@call(2, ALONE)
def bf16_and_back(pair, draw):
    """Weights rounded at random equal none of torch's: both sides start again from ours."""
    before, pair.tolerance = pair.tolerance, 1e30
    if pair.do(lambda s: s.cast(torch.bfloat16)):
        pair.train(draw)
        pair.do(lambda s: s.cast(getattr(torch, pair.setup["dtype"])))
    pair.adopt()
    pair.tolerance = before


@call(6)
def save(pair, draw):
    pair.do(lambda s: s.save())
    pair.saved = pair.composition()


@call(6)
def load(pair, draw):
    if pair.saved == pair.composition():
        pair.do(lambda s: s.load())


@call(3)
def resume(pair, draw):
    if pair.saved == pair.composition():
        pair.do(lambda s: s.again()) and pair.do(lambda s: s.load())


@call(3, ("plain", "fused", "fsdp2"))
def states_of_another_dtype(pair, draw):
    dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16])
    pair.tolerance = max(pair.tolerance, {4: 1e-5, 2: 0.05}.get(dtype.itemsize, 0.0))

    def cast(side: Side) -> None:
        saved = side.states()
        saved["state"] = walk(saved["state"], lambda t: t.to(dtype) if t.is_floating_point() else t)
        side.optimizer.load_state_dict(saved)

    pair.do(cast)


@edit(3, ALONE, refusable=True)
def states_of_another_shape(side, draw):
    saved = copy.deepcopy(side.states())
    found = [t for t in tensors(saved["state"]) if t.dim() and t.shape[-1] > 1]
    if found:
        cut = draw.choice(found)
        cut.data = cut.data[..., :-1].clone()
        side.optimizer.load_state_dict(saved)
        raise AssertionError("took a state of another shape")


@edit(3, ALONE, refusable=True)
def states_of_another_optimizer(side, draw):
    kind = draw.choice([k for k in KINDS if k != side.setup["kind"]])
    params = {n: nn.Parameter(p.detach().clone()) for n, p in side.model.named_parameters()}
    groups = [{"params": [params[n] for n in names], **h} for names, h in side.structure()]
    other = side.make(kind, groups)
    for p in params.values():
        p.grad = torch.ones_like(p)
    other.step()
    side.optimizer.load_state_dict(other.state_dict())


@edit(3, ALONE)
def deep_copy(side, draw):
    copies = copy.deepcopy((side.model, side.optimizer))
    side.detach()
    side.model, side.optimizer = copies
    side.attach()


@edit(1, ("fused",))
def fused_again(side, draw):
    side.detach()
    side.attach()
