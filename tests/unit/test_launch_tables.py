"""Tables of launches that earlier steps have made: a step gives kernels what fresh tables would.

Each step is made twice from the same state, with and without the tables of earlier steps. Launches
only note their arguments and do nothing. Memory comes from the same addresses both times.
"""

import copy
import itertools
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from ds_ext.ops import Scaled
from ds_ext.ops.batch import Flat, PointerArray, Runs
from ds_ext.ops.executors.native import native_table as native
from ds_ext.ops.executors.triton import devices, launch_memory, launch_queue, launches
from ds_ext.ops.executors.triton.columns import COLUMNS
from ds_ext.ops.executors.triton.launch_queue import LaunchQueue
from ds_ext.ops.executors.triton.launcher import GradLimits, Launcher
from ds_ext.ops.formulas import Formula
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import mapped
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.nonfinite import DeviceGradFlags, GradCheck
from ds_ext.optimizer.update_stats import UpdateStats
from ds_ext.optimizer.updates import RunUpdate
from tests.common import needs, paths, table
from tests.common.choose import params, spread
from tests.common.hypers import SIMULATED
from tests.unit.test_native import BATCHED

pytestmark = needs.triton
# Vectors, matrices of two widths of tiles, and rows that are wider than any tile.
SHAPES = ((48,), (5,), (20, 32), (9, 30), (3, 1040), (2, 20000))
WAYS = [(torch.float32, "nearest"), (torch.bfloat16, "stochastic"), (torch.bfloat16, "master")]
CASES = spread(BATCHED, [(way,) for way in WAYS])
WORDS = 2**21  # of each of three buffers


class Twice:
    """Makes steps of an optimizer twice, and compares their launches."""

    def __init__(self, monkeypatch, name, way):
        dtype, mode = way
        paths.use(monkeypatch, "ops")
        monkeypatch.setattr(devices, "DEVICES", {"cpu"})
        monkeypatch.setattr(native, "is_available", lambda: False)
        monkeypatch.setattr(launches, "launch_kernel", self.note)
        monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda run: None)
        monkeypatch.setattr(launch_memory.Memory, "_made", lambda _, *given: self.allocate(*given))
        original = launch_queue.LaunchTables
        monkeypatch.setattr(launch_queue, "LaunchTables", self.counting(original))
        self.weights = [nn.Parameter(p) for p in table.weights(SHAPES, dtype)]
        groups = [{"params": self.weights[::2]}, {"params": self.weights[1::2]}]
        self.optimizer = OPTIMIZERS[name](groups, **SIMULATED[name], weight_update=mode)
        self.buffers = [torch.zeros(WORDS, dtype=torch.int64) for _ in range(3)]
        self.made, self.noted, self.used = 0, [], [0, 0, 0]

    def counting(self, original):
        def make(*args):
            self.made += 1
            return original(*args)

        return make

    def allocate(self, which, n):
        """Memory of which each step gets the same."""
        words = n if which == launch_memory.HOST else -(-n // 2)
        start = self.used[which]
        self.used[which] = start + -(-words // 8) * 8
        found = self.buffers[which][start : start + words].zero_()
        return found if which == launch_memory.HOST else found.view(torch.float32)[:n]

    def note(self, label, programs, words, count, named, warps):
        """Stands for a launch."""
        self.noted.append((label, programs, words.numpy().tobytes(), count, named, warps))

    @contextmanager
    def without_tables(self):
        """A context in which nothing is known from earlier steps."""
        owners = []
        for plan in self.optimizer._plans._made.values():
            owners.append((plan, "launch_tables"))
            for one in plan.batches:
                owners += [(one.batch.own, "_templates"), (one.batch.whole, "_templates")]
        kept = [vars(owner)[name] for owner, name in owners]
        for owner, name in owners:
            setattr(owner, name, {})
        yield
        for (owner, name), known in zip(owners, kept, strict=True):
            setattr(owner, name, known)

    def step(self, grads, params=None, factor=1.0, checks=True):
        """Makes a step of some parameters twice; returns how many tables it made anew."""
        updates = []
        for p, g in zip(self.weights, grads, strict=True):
            if params is None or any(p is x for x in params):
                g = g.view(-1) if factor == 1 else Scaled(g.view(-1), factor, 0.5)
                updates.append(RunUpdate(p, p.detach().view(-1), g, Shard.whole(tuple(p.shape))))
        shards = {u.param: u.shard for u in updates}
        first = self.optimizer.first_round_checks(shards) if checks else set()
        votes = {p: torch.ones(()) for p in shards if checks and p not in first}
        flags = DeviceGradFlags(len(SHAPES))
        if self.optimizer.update_stats is not None:  # its sums are added to
            self.optimizer.update_stats = UpdateStats(2)
        found, made = [], []
        for with_known in (False, True, False):  # the first one finds how much memory it takes
            self.noted, self.used, before = [], [0, 0, 0], self.made
            check = GradCheck(first, votes, flags)
            with nullcontext() if with_known else self.without_tables():
                self.optimizer.update(updates, lambda total: None, check)
            found.append(self.noted)
            made.append(self.made - before)
            for p in shards:
                self.optimizer.state[p]["step"] -= 1
        for p in shards:
            self.optimizer.state[p]["step"] += 1
        self.optimizer.commit_weight_norms()
        _, known, fresh = found
        assert [one[0] for one in known] == [one[0] for one in fresh] and fresh
        tensors = [*self.buffers, *self.weights, *grads]
        mapped(dict(self.optimizer.state), tensors.append)
        ranges = [(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in tensors]
        for a, b in zip(known, fresh, strict=True):
            assert a[4] is b[4] and a[1] == b[1] and a[3] == b[3] and a[5] == b[5], a[0]
            words = np.stack([np.frombuffer(x[2], np.int64) for x in (a, b)])
            for i in np.flatnonzero(words[0] != words[1]):  # what rules have allocated anew
                for at in words[:, i]:
                    is_known = any(low <= at < high for low, high in ranges)
                    assert at > 2**40 and not is_known, (a[0], COLUMNS[i % len(COLUMNS)])
        assert made[2], "nothing was made anew"
        return made[1]


@pytest.mark.parametrize("name, way", params(CASES, CASES))
def test_kernels_get_what_fresh_tables_would_give_them(name, way, monkeypatch):
    """Whatever changes between two steps; a step like an earlier one makes no tables."""
    both = Twice(monkeypatch, name, way)
    optimizer, (first, second) = both.optimizer, both.optimizer.param_groups
    steps = iter(table.gradients(30, SHAPES, way[0]))
    for _ in range(3):
        both.step(next(steps))
    is_marked = way[1] == "master"  # passes over marks have tables of one step
    for rate in (0.5, 2.0):  # a scheduler
        first["lr"] = second["lr"] = rate
        assert is_marked or not both.step(next(steps))
    if "weight_decay" in first:
        for decay in (0.0, 0.3, 0.7, 0.0):
            second["weight_decay"] = decay
            both.step(next(steps))
    for factor in (0.5, 0.25, torch.tensor(0.5), 1.0):  # clipped
        both.step(next(steps), factor=factor)
    odd = [torch.cat([g.view(-1)[:1], g.view(-1)])[1:] for g in next(steps)]  # not aligned
    both.step(odd)
    both.step([g if i % 3 else x for i, (g, x) in enumerate(zip(next(steps), odd, strict=True))])
    both.step(next(steps), checks=False)
    both.step(next(steps), params=both.weights[1:])  # one is frozen
    assert is_marked or not both.step(next(steps)) or name == "lamb"
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    both.step(next(steps))
    optimizer.update_stats = UpdateStats(2)
    for _ in range(2):
        both.step(next(steps))


def arguments(table_):
    """Arguments of ``launches`` that differ in one thing each."""
    runs = [Runs([torch.zeros(n + 4)[at : n + at] for n in (32, 600)]) for at in (0, 0, 1)]
    one, two = (Formula.given(torch.ones(2)) for _ in range(2))
    rate = (("RATE", None),)
    each = np.ones(2, dtype=np.float32)
    given = {"x": runs[0], "lr": 0.5}
    return [
        ("apply", rate, table_.flat, given),
        ("lerp", rate, table_.flat, given),
        ("apply", (*rate, ("DECAYS", True)), table_.flat, given),
        ("apply", rate, table_.by_matrix, given),
        ("apply", rate, table_.flat, {"m": runs[0], "lr": 0.5}),
        ("apply", rate, table_.flat, {"x": runs[0], "eps": 0.5}),
        ("apply", rate, table_.flat, {"x": runs[0], "lr": each}),
        ("apply", rate, table_.flat, {"x": runs[0], "lr": one + two}),
        ("apply", rate, table_.flat, {"x": runs[0], "lr": one - two}),
        ("apply", rate, table_.flat, {"x": runs[2], "lr": 0.5}),
        ("apply", rate, table_.flat, {"x": Runs([runs[0].tensors[0], runs[2].tensors[1]])}),
    ]


def launcher():
    return Launcher([(0, 32, 1, 4, 8), (0, 600, 1, 20, 30)], [0, 0], torch.device("cpu"))


def shown(found):
    """What templates contain."""
    return [
        (t.kernel, t.constants, t.rows.tolist(), t.programs.tolist(), [*t.columns], t.numbers)
        for t in (one.template for one in found)
    ]


def test_all_that_templates_depend_on_is_in_their_key():
    for a, b in itertools.permutations(range(len(arguments(launcher()))), 2):
        used, fresh = launcher(), launcher()
        used.launches(*arguments(used)[a])
        assert shown(used.launches(*arguments(used)[b])) == shown(
            fresh.launches(*arguments(fresh)[b])
        ), (a, b)


def test_folds_with_and_without_limits_have_templates_of_their_own():
    of = launcher()
    part, out = torch.zeros(64), Flat(torch.zeros(2), np.arange(2))
    limits = GradLimits(PointerArray(out.pointers, out.values), np.ones(2, dtype=np.float32))
    for of.limits in (None, limits, None):
        found = of.reduction_launch(of.sums["flat"], part, out)
        assert len(found.numbers) == len(found.template.numbers) == (of.limits is not None)
        assert dict(found.template.constants)["JUDGED"] == (of.limits is not None)


def test_all_that_tables_depend_on_is_in_their_key(monkeypatch):
    """Queues of other passes, sequences or folds share no tables."""
    monkeypatch.setattr(launches, "launch_all", lambda tables, *_: found.append(tables.joints))
    of = launcher()
    constants = (("FORM", "IS_RUN"), ("XD", "float32"), ("WD", "float32"))
    x = {"x": Runs([torch.zeros(600)] * 2)}
    lerp, apply, sums = (
        of.launches(kernel, constants, at, x)
        for kernel, at in (("lerp", of.flat), ("apply", of.flat), ("square_sums", of.by_matrix))
    )
    folds = [
        of.reduction_launch(how, torch.zeros(640), Flat(torch.zeros(60), np.arange(2)))
        for how in (of.sums["flat"], of.sums_of_strips)
    ]
    queues = [
        [[(lerp, False), (sums, False)], []],
        [[(sums, False), (lerp, False)], []],
        [[(lerp, True), (sums, False)], []],
        [[(lerp, False)], [(sums, False)], []],
        [[(lerp, False), (apply, False)], []],
        [[(lerp, False), (sums, False)], folds[:1]],
        [[(lerp, False), (sums, False)], folds[1:]],
        [[(lerp, False), (sums, False)], folds],
        [[], folds[:1]],
    ]
    shared = {}
    for *sequences, own in [*queues, *queues]:
        found = []
        for tables in (shared, {}):
            queue = LaunchQueue(launch_memory.Memory(torch.device("cpu")), tables)
            for passes in sequences:
                queue.begin_sequence()
                for made, only_sums in passes:
                    queue.add(made, (), only_sums)
            queue.add([], own)
            queue.launch()
        known, fresh = [[(one.label, one.passes, one.ends.tolist()) for one in x] for x in found]
        assert known == fresh
    assert len(shared) == len(queues)
