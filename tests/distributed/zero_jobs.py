"""Training under every stage of ZeRO by every optimizer: jobs of test_zero.py, on real ranks."""

import contextlib
import time
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_ext.backward import buckets, reduction
from ds_ext.distributed import placement
from tests.common import by_role, models
from tests.common.by_role import MATRICES
from tests.common.hypers import FOR_ALL, TRAINED, changed
from tests.common.ranks import identical, whole
from tests.distributed import training_jobs
from tests.distributed.training_jobs import STEPS, Training, config


def is_used(name: str) -> bool:
    """Whether a parameter gets a gradient, at least in some steps."""
    return not name.startswith(("frozen", "unused"))


# What differs between rules is shown by simulation, and by a case of each at every stage. How
# gradients arrive does not depend on the rule: that is run for these four.
FOUR = ("lomo", "adalomo", "adafactor", "came")
RENEWED = {"lr": 0.02, "update_proj_gap": 3}  # a projection, in step 4
HYPERS = changed(
    TRAINED,
    galoreadamw={"nbits": 32},
    adafactor={"lr": 0.03},
    apollo=RENEWED,
    apollomini=RENEWED | {"lr": 0.005},
    muon={"lr": 0.02},
)
RULES = tuple(FOR_ALL)
CASES: dict[str, Training] = {}


def case(rule: str, at: str = "", stage: int | None = 3, kind: str | None = None, **how: Any):
    own = HYPERS[rule] | how.pop("own", {})
    CASES[rule + at] = Training(rule, stage, checkpointing=kind, own=own, dropout=0.0, **how)


LOSS: dict[str, Any] = {"how": "tensor"}  # backward is called of the loss itself
NO_DECAY: dict[str, Any] = {"own": {"weight_decay": 0.0}}
for _rule in RULES:
    case(_rule, **NO_DECAY)
    case(_rule, "-plain", None, **LOSS)
    for _stage in (0, 1, 2):
        case(_rule, f"-stage{_stage}", _stage, is_json=_stage == 1 and _rule in FOUR)
for _rule in FOUR:
    case(_rule, "-partitioned", persist=0, **LOSS)
    case(_rule, "-decay-json", is_json=True, bucket=10**6)
    case(_rule, "-reentrant", 3, "reentrant", **LOSS)
    case(_rule, "-nonreentrant", 3, "nonreentrant", bucket=1)
    case(_rule, "-zero-init", zero_init=True, bucket=1)
    case(_rule, "-zero-init-reentrant", 3, "reentrant", zero_init=True, bucket=1, **NO_DECAY)
    case(_rule, "-plain-reentrant", None, "reentrant", bucket=1, **LOSS)
    for _stage in (0, 1, 2):
        case(_rule, f"-stage{_stage}-reentrant", _stage, "reentrant", bucket=1, **LOSS)
for _stage in range(4):
    case("adalomo", f"-bf16-stage{_stage}", _stage, extra={"bf16": {"enabled": True}}, **NO_DECAY)
for _rule in MATRICES:  # by the roles of parameters, as a JSON config says
    case(_rule, "-plain", None, **LOSS)
    for _stage in range(4):
        case(_rule, f"-stage{_stage}", _stage, is_json=True)
        case(_rule, f"-stage{_stage}-reentrant", _stage, "reentrant", is_json=True)
    case(_rule, "-nonreentrant", 3, "nonreentrant", is_json=True)
    case(_rule, "-zero-init", zero_init=True, is_json=True)


def build(case: Training) -> models.Zoo:
    weights = models.make(case.checkpointing)
    if not case.zero_init:
        return weights
    with deepspeed.zero.Init(config_dict_or_path=config(case)):
        model = models.Zoo(case.checkpointing)
    for p, w in zip(model.parameters(), weights.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            p.copy_(w)
    return model


def most_alive(case: Training, ranks: int) -> int:
    """Gradient elements that may be alive at once: those of one bucket and of one parameter."""
    parameters = models.make().parameters()
    largest = max(-(-p.numel() // ranks) * ranks for p in parameters)
    most = max(case.bucket, largest) + largest
    if ranks > 1 and case.stage in (3, None):  # the bucket before is on its way
        most += max(case.bucket, largest)
    return most


class Watch:
    """Measures what the gradient path holds and sends while it runs; ``most`` may be held."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.alive = 0  # most gradient elements alive at once, copies counted
        self.sent: list[tuple[str, int]] = []
        self.refs: list[tuple[StorageWeakRef, int]] = []

    def hook(self):
        """A hook that counts around FusedBackward's."""
        original = buckets.Buckets.take

        def take(fused: buckets.Buckets, param: torch.Tensor) -> None:
            self.refs.append((StorageWeakRef(param.grad.untyped_storage()), param.grad.numel()))
            self._count(fused)
            original(fused, param)
            self._count(fused)

        return mock.patch.object(buckets.Buckets, "take", take)

    def _count(self, fused: buckets.Buckets) -> None:
        for _ in range(20):
            if self._held(fused) <= self.most:
                break
            time.sleep(0.002)  # gloo's threads let go of what they have sent a little later
        self.alive = max(self.alive, self._held(fused))

    def _held(self, fused: buckets.Buckets) -> int:
        """Elements of gradients, and of copies of them that wait."""
        self.refs = [(ref, n) for ref, n in self.refs if not ref.expired()]
        known = {ref.cdata for ref, _ in self.refs}
        waiting = [f for f in fused.waiting.values() if f is not None]
        flats = {StorageWeakRef(f.untyped_storage()).cdata: f for f in waiting}
        copies = sum(f.numel() for cdata, f in flats.items() if cdata not in known)
        return sum(n for _, n in self.refs) + copies

    @contextlib.contextmanager
    def collectives(self):
        """Notes each call that sums: (what it is, elements). "bucket" is how gradients leave."""

        def spy(owner, method, name):
            original = getattr(owner, method)

            def call(*args, **kwargs):
                x = args[-1] if name != "bucket" else args[2]
                if name == "bucket":
                    self.sent.append((name, len(x)))
                    known = {ref.cdata for ref, _ in self.refs}
                    own = [g for g in x if g is not None]
                    flats = [(StorageWeakRef(g.untyped_storage()), g.numel()) for g in own]
                    self.refs += [(ref, n) for ref, n in flats if ref.cdata not in known]
                elif isinstance(x, (list, tuple)):
                    self.sent.append((name, sum(t.numel() for t in x)))
                elif x.is_floating_point():  # not the ranks' agreement on a bucket
                    self.sent.append((name, x.numel()))
                return original(*args, **kwargs)

            return mock.patch.object(owner, method, call)

        with (
            spy(dist, "all_reduce", "all_reduce"),
            spy(placement.Replicated, "_begin_sum", "all_reduce"),
            spy(placement.Sharded, "_begin_sum", "reduce_scatter"),
            spy(reduction.Reduction, "begin", "bucket"),
        ):
            yield


def train(name: str) -> dict[str, Any]:
    """Runs a case of ``CASES`` -> initial and final weights, norms, and what was watched."""
    case, rank, world = CASES[name], dist.get_rank(), dist.get_world_size()
    model = build(case)
    if case.stage is None and rank:
        torch.nn.init.zeros_(model.row)  # to be mended by rank 0's
    watch = Watch(most_alive(case, world))
    with watch.hook():
        engine = training_jobs.start(case, model)
    before = whole(model)
    norms, kept, sent = [], 0, []
    for step in range(STEPS):
        watch.sent = []
        with watch.collectives():
            loss = training_jobs.loss_of(engine, case, step, 0, rank, world)
            loss.backward() if case.how == "tensor" else engine.backward(loss)
            kept += sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
            if case.stage is None:
                engine.step()  # the last bucket waits for it
            sent = list(watch.sent)
            if case.stage is not None:
                engine.step()
            if step == 1:
                engine.step()  # accelerate may call it again
        norms.append(engine.get_global_grad_norm())
    after = whole(model)
    names = {p: n for n, p in model.named_parameters()}
    result = {
        "before": before,
        "after": after,
        "identical": identical(after),
        "norms": norms,
        "kept": kept,
        "alive": watch.alive,
        "sent": sent,
        "steps": {names[p]: state["step"] for p, state in engine.optimizer.state.items()},
    }
    result |= by_role.told(engine.optimizer, model)
    engine.destroy()
    return result
