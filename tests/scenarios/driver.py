"""A sequence of calls on both sides, compared after each; what a seed makes of them."""

import contextlib
import linecache
import logging
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.common.states import same
from tests.scenarios import odd_rule
from tests.scenarios.calls import CALLS, NAMES
from tests.scenarios.sides import KINDS, Reference
from tests.scenarios.ways import WAYS

Sequence = tuple[dict[str, Any], list[tuple[str, int]]]  # a setup; calls, each with its seed
LONGEST = 14
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}


class Finding(Exception):
    """What is wrong, the same on all ranks."""


class Pair:
    """The two sides of a sequence."""

    def __init__(self, way: str, setup: dict[str, Any]) -> None:
        self.way, self.setup = way, setup
        self.tolerance = TOLERANCE[setup["dtype"]] * (3 if setup["kind"] == "CAME" else 1)
        self.refusals: Counter[str] = Counter()
        self.wrong = ""  # what is to be told at the next comparison
        self.saved: Any = None  # the composition of what was saved
        self.subject = WAYS[way](setup)
        self.reference = Reference(setup, range(self.subject.world))
        self.reference.moved = self.moved
        self.settle()

    @property
    def has_failed_in_hooks(self) -> bool:
        """Whether a backward pass was refused by a hook of a parameter.

        Torch then keeps that pass's AccumulateGrad nodes, without ds_ext too. Gradients of a
        parameter that is resized afterwards have the wrong shape for them.
        """
        in_backward = ("resized", "two_backward_passes")  # of one forward pass, too
        return any(text.startswith(in_backward) for text in self.refusals)

    def settle(self) -> None:
        """Begins to compare, from the weights as they are."""
        self.ours, self.counts = self.subject.whole(), self.counted()
        self.steps, self.eps = 0, 0.0  # of the least precise dtype
        self.path = {n: 0.0 for n in self.ours}  # how far steps have moved each
        self.error = {n: torch.zeros((), dtype=torch.double) for n in self.ours}  # sums of steps'

    def adopt(self) -> None:
        """Gives the reference the weights of the subject, and both a new optimizer."""
        self.subject.detach()
        for side in (self.subject, self.reference):
            side.optimizer = side.make(self.setup["kind"], side.groups_of(side.structure()))
            side.zero_grad()
        self.subject.attach()
        for name, p in self.subject.whole().items():
            self.reference.param(name).data = p.clone()
        self.reference.previous = None
        self.settle()

    def composition(self) -> Any:
        """What has to be alike for torch to load a state: names by group, and sizes."""
        return [names for names, _ in self.reference.structure()], self.reference.rows

    def do(self, act: Callable[[Any], Any]) -> bool:
        """A call on both sides; False if ours refuses it in words, and has changed nothing.

        Then both give up the step that is in progress.
        """
        before, refusal, wrong = self.subject.snapshot(), "", ""
        try:
            act(self.subject)
        except Exception as error:
            refusal = said(error)
            wrong = "" if refusal else told(error)
        self.agree(wrong, refusal)
        if refusal:
            self.refusals[f"{self.call}: {refusal}"] += 1
            self.subject.give_up()
            after = self.subject.snapshot()
            changed = [n for n in before if not same(before[n], after.get(n))]
            if changed and not self.wrong:
                self.wrong = f"refused ({refusal}), but changed {changed}"
            elif not CALLS[self.call].is_refusable:
                self.wrong = self.wrong or f"refused: {refusal}"
            self.reference.give_up()
            return False
        try:
            act(self.reference)
        except Exception as error:
            self.wrong = self.wrong or f"ours took what torch refuses: {told(error)}"
        return True

    def train(self, draw: random.Random, passes: int = 1, drops: Any = (), **how: Any) -> bool:
        """One step, if it is not refused: its micro-batches, each of so many backward passes.

        Both sides make losses as ``how`` says.
        """
        seed = draw.randrange(10**6)
        for micro in range(self.setup["accumulation"]):
            parts = [
                lambda s, n=seed + 10 * micro + i: s.backward(s.loss(n, **how))
                for i in range(passes)
            ]
            if drops and draw.random() < 0.7:
                parts.append(lambda s: s.drop(drops))
            well = all(map(self.do, [*parts, lambda s: s.step()]))
            if not well:
                break
        self.compare()
        return well

    def moved(self) -> list[str]:
        """Names of what the subject has stepped since weights were compared last.

        Decay and update of a weight may cancel each other. Then the optimizer's count shows it.
        """
        now, counts = self.subject.whole(), self.counted()
        same_count = {n for n in counts if counts[n] == self.counts.get(n)}
        return [n for n in self.ours if not (same(self.ours[n], now[n]) and n in same_count)]

    def counted(self) -> dict[str, float]:
        """The steps of each parameter that the subject's optimizer has counted."""
        states = self.subject.optimizer.state
        named = self.subject.model.named_parameters()
        return {n: float(states.get(p, {}).get("step", 0)) for n, p in named}

    def agree(self, wrong: str, outcome: str = "") -> None:
        """Raises Finding if something is wrong on a rank, or ranks fared differently."""
        if not dist.is_initialized():
            if wrong:
                raise Finding(wrong)
            return
        flags = torch.tensor([bool(wrong), bool(outcome), not outcome])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        if flags[0] or flags[1:].all():
            outcomes = [None] * dist.get_world_size()
            dist.all_gather_object(outcomes, wrong or outcome)
            raise Finding("\non another rank: ".join(dict.fromkeys(map(str, outcomes))))

    def compare(self, were_stepped: bool = True) -> None:
        """Holds weights, and what was trained beside them, against the reference's.

        Then the reference goes on from our weights, so that a step's rounding error does not grow
        by the steps that follow it; but errors add up, over the way that steps have moved a weight.
        """
        ours, theirs, wrong = self.subject.whole(), self.reference.whole(), self.wrong
        self.steps += were_stepped
        for name, p in theirs.items():
            old, own = self.ours[name], ours[name]
            if own.shape != p.shape or own.dtype != p.dtype:
                wrong = wrong or f"{name} is {own.dtype} {[*own.shape]}, not {p.dtype} {[*p.shape]}"
                continue
            if old.shape != p.shape:
                self.error[name] = torch.zeros((), dtype=torch.double)
            elif were_stepped:
                self.path[name] += float((p.double() - old.double()).norm())
            self.error[name] = self.error[name] + (own.double() - p.double())
            off = float(self.error[name].norm())
            self.eps = max(self.eps, torch.finfo(p.dtype).eps)
            rounding = (1 + self.steps) ** 0.5 * self.eps * float(p.norm())
            if not off <= self.tolerance * self.path[name] + rounding:
                off /= self.path[name] or 1.0
                wrong = wrong or f"{name} is off by {off:.1e} of its update"
            self.reference.param(name).data.copy_(own)
        rank = min(self.subject.ranks)
        own, theirs = self.subject.beside(rank), self.reference.beside(rank)
        for name in sorted(own.keys() | theirs.keys()):
            if name not in own or name not in theirs:
                wrong = wrong or f"{name} is there on one side only"
            elif not close(own[name], theirs[name], 10 * self.tolerance):
                wrong = wrong or f"{name} is wrong"
        for inputs in (*self.subject.inputs.values(), *self.reference.inputs.values()):
            inputs.clear()
        self.ours, self.counts = ours, self.counted()
        self.agree(wrong)


def close(x: torch.Tensor, y: torch.Tensor, tolerance: float) -> bool:
    return bool((x - y).norm() <= tolerance * y.norm()) or (
        not y.isfinite().all() and torch.equal(x.isfinite(), y.isfinite())
    )


def said(error: Exception) -> str:
    """The sentence of an error that somebody wrote, not a failure of torch's in the middle."""
    if not isinstance(error, ValueError | RuntimeError):
        return ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    written = line.startswith("raise ") and " " in str(error).strip()
    return re.sub(r"[\d.e-]*\d", "#", str(error).split("\n")[0])[:160] if written else ""


def told(error: Exception) -> str:
    return "".join(traceback.format_exception(error)[-5:])


def made(way: str, seed: int) -> Sequence:
    draw = random.Random(f"{way} {seed}")
    groups: list[tuple[list[str], dict[str, Any]]] = [
        ([], {"lr": lr, "weight_decay": draw.choice([0.0, 0.1])})
        for lr in draw.sample([0.005, 0.01, 0.02], draw.choice([1, 2, 3]))
    ]
    for name in NAMES:
        if draw.random() < 0.95:
            draw.choice(groups)[0].append(name)
    policies = {"plain": ["plain"], "fsdp2": ["plain", "fused", "sharded"]}
    policy = draw.choice(policies.get(way, ["fused", "sharded"]))
    clips = ["none", "exact", "value"] + ["previous"] * (policy == "fused")
    setup = {
        "way": way,
        "kind": draw.choice([*KINDS]),
        "groups": [group for group in groups if group[0]],
        "rows": draw.choice([7, 9]),
        "dtype": "float64" if way in ("plain", "fused") and draw.random() < 0.15 else "float32",
        "policy": policy,
        "accumulation": 1 if policy == "fused" else draw.choice([1, 1, 2, 3]),
        "clip": draw.choice(clips),
        "max": draw.choice([0.05, 1.0]),
        "bucket": draw.choice([1, 60, None]),
        "stage": draw.randrange(4),
    }
    found = {name: call for name, call in CALLS.items() if way in call.ways}
    names = draw.choices([*found], [call.weight for call in found.values()], k=LONGEST)
    return setup, [(name, draw.randrange(10**6)) for name in names]


def play(
    way: str, sequence: Sequence, note: Callable[[int], None] = lambda n: None
) -> tuple[int, str, Counter[str]]:
    """Runs a sequence -> how many calls it came to, what was found ("": nothing), refusals."""
    setup, calls = sequence
    done, wrong, pair = 0, "", None
    with _quiet(), odd_rule.registered():
        try:
            note(0)
            pair = Pair(way, setup)
            for done, (name, seed) in enumerate(calls, 1):
                note(done)
                pair.call = name
                CALLS[name].make(pair, random.Random(seed))
                pair.compare(were_stepped=False)
        except Finding as finding:
            wrong = str(finding)
        if pair is not None:
            with contextlib.suppress(Exception if wrong else ()):
                pair.subject.detach()
    return done, wrong, pair.refusals if pair else Counter()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within it, ds_ext logs errors only."""
    logger = logging.getLogger("ds_ext")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def shortest(sequence: Sequence, fails: Callable[[Sequence], bool]) -> Sequence:
    """A sequence that still fails and of which no call can be left out."""
    setup, calls = sequence
    for i in reversed(range(len(calls))):
        fewer = calls[:i] + calls[i + 1 :]
        if fails((setup, fewer)):
            calls = fewer
    simple = {"clip": "none", "accumulation": 1, "bucket": None, "kind": "LOMO", "stage": 0}
    for key, value in simple.items():
        if setup[key] != value and fails((setup | {key: value}, calls)):
            setup = setup | {key: value}
    return setup, calls
