"""Launches that earlier steps have prepared: a step gives kernels what a fresh one would.

Each step is made twice from the same state, with and without what earlier steps have left. Launches
only note their arguments and do nothing. Memory comes from the same addresses both times.
"""

import copy
import ctypes
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from ds_ext.ops import Scaled, schema
from ds_ext.ops.executors.native import native_table as native
from ds_ext.ops.executors.triton import devices, kernels, launch_memory, launches
from ds_ext.ops.executors.triton.launcher import LEAST_ADDRESS
from ds_ext.ops.schema import ADDRESSES, ARGUMENT, ARGUMENTS, AT, NUMBERS, TILE
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import mapped
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.nonfinite import GradCheck, GradFlags
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.update_stats import UpdateStats
from ds_ext.optimizer.updates import RunUpdate
from tests.common import needs, paths, spies, table
from tests.common.choose import params, spread
from tests.common.hypers import BATCHED, SIMULATED

pytestmark = needs.triton
# Vectors, matrices of two widths of tiles, and rows that are wider than any tile.
SHAPES = ((48,), (5,), (20, 32), (9, 30), (3, 1040), (2, 20000))
WAYS = [(torch.float32, "nearest"), (torch.bfloat16, "stochastic"), (torch.bfloat16, "master")]
CASES = spread(BATCHED, [(way,) for way in WAYS])
LONG = ("sinkgd", "adafactor", "came")
WORDS = 2**21  # of each of three buffers


def at(address, count, dtype):
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).copy()


def read(launch, arguments):
    """What a kernel reads of its arguments: rows, addresses and numbers by column."""
    n, count = 1 + launch.rows[:, AT["index"]].max(), arguments[1]
    found = {"rows": at(arguments[0], count * len(TILE), np.int64)}
    for name in ADDRESSES:
        base, offsets = arguments[ARGUMENT[name] : ARGUMENT[name] + 2]
        if offsets:
            found[name] = base + at(offsets, n, np.int64)
    for name in NUMBERS:
        number = arguments[ARGUMENT[name]]
        is_vector = number >= LEAST_ADDRESS
        found[name] = at(number, n, np.uint32) if is_vector else np.uint32(number & 0xFFFFFFFF)
    return found


class Apart:
    """Memory of which each request gets its own."""

    scratch = staticmethod(lambda n: torch.empty(n, dtype=torch.float32))
    host = staticmethod(lambda n: torch.empty(n, dtype=torch.int64))


class Twice:
    """Makes steps of an optimizer twice, and compares what their launches read."""

    def __init__(self, monkeypatch, name, way):
        dtype, mode = way
        paths.use(monkeypatch, "ops")
        monkeypatch.setattr(devices, "DEVICES", {"cpu"})
        monkeypatch.setattr(native, "is_available", lambda: False)
        monkeypatch.setattr(launches, "launch_kernel", self.note)
        monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda run: None)
        monkeypatch.setattr(launch_memory.Memory, "_made", lambda _, *given: self.allocate(*given))
        copy_ = launch_memory.DeviceArrays._copy

        def apart(arrays, contents):
            """A copy, whose memory does not move that of passes."""
            self.copies += 1
            memory, arrays.memory = arrays.memory, Apart
            copy_(arrays, contents)
            arrays.memory = memory

        monkeypatch.setattr(launch_memory.DeviceArrays, "_copy", apart)
        self.weights = [nn.Parameter(p) for p in table.weights(SHAPES, dtype)]
        groups = [{"params": self.weights[::2]}, {"params": self.weights[1::2]}]
        self.optimizer = OPTIMIZERS[name](groups, **SIMULATED[name], weight_update=mode)
        self.buffers = [torch.zeros(WORDS, dtype=torch.int64) for _ in range(3)]
        self.copies, self.noted, self.used = 0, [], [0, 0, 0]

    def allocate(self, which, n):
        """Memory of which each step gets the same."""
        words = n if which == launch_memory.HOST else -(-n // 2)
        start = self.used[which]
        self.used[which] = start + -(-words // 8) * 8
        found = self.buffers[which][start : start + words].zero_()
        return found if which == launch_memory.HOST else found.view(torch.float32)[:n]

    def note(self, launch, arguments, device):
        """Stands for a launch."""
        self.noted.append((launch, read(launch, arguments)))

    @contextmanager
    def afresh(self):
        """A context in which nothing is known from earlier steps."""
        owners = []
        for plan in self.optimizer._plans.values():
            for one in plan.batches:
                owners += [
                    (of, "_launches") for of in (one.batch.passes.own, one.batch.passes.whole)
                ]
                owners.append((one.batch.passes.arrays, "_used"))
        kept = [vars(owner)[name] for owner, name in owners]
        for owner, name in owners:
            setattr(owner, name, {})
        yield
        for (owner, name), known in zip(owners, kept, strict=True):
            setattr(owner, name, known)

    def step(self, grads, params=None, factor=1.0, checks=True):
        """Makes a step of some parameters twice; returns the copies of the later one."""
        updates = []
        for p, g in zip(self.weights, grads, strict=True):
            if params is None or any(p is x for x in params):
                g = g.view(-1) if factor == 1 else Scaled(g.view(-1), factor, 0.5)
                updates.append(RunUpdate(p, p.detach().view(-1), g, Shard.whole(tuple(p.shape))))
        shards = {u.param: u.shard for u in updates}
        first = self.optimizer.first_round_checks(shards) if checks else set()
        votes = {p: torch.ones(()) for p in shards if checks and p not in first}
        flags = GradFlags()
        if self.optimizer.update_stats is not None:  # its sums are added to
            self.optimizer.update_stats = UpdateStats(2)
        found, copies = [], []
        for is_fresh in (True, True, False):  # the first one finds how much memory it takes
            self.noted, self.used, self.copies = [], [0, 0, 0], 0
            check = GradCheck(first, votes, flags)
            with self.afresh() if is_fresh else nullcontext():
                self.optimizer.update(updates, Alone(), check)
            found.append(self.noted)
            copies.append(self.copies)
            for p in shards:
                self.optimizer.state[p]["step"] -= 1
        for p in shards:
            self.optimizer.state[p]["step"] += 1
        self.optimizer.commit_weight_norms()
        _, fresh, known = found
        assert fresh and len(fresh) == len(known)
        tensors = [*self.buffers, *self.weights, *grads]
        mapped(dict(self.optimizer.state), tensors.append)
        ranges = [(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in tensors]
        for (a, reads_a), (b, reads_b) in zip(known, fresh, strict=True):
            assert a.kind == b.kind and a.warps == b.warps and a.programs == b.programs
            assert reads_a.keys() == reads_b.keys(), a.kind.name
            for name, x in reads_a.items():
                if not np.array_equal(x, reads_b[name]):  # what rules have allocated anew
                    for address in (*x, *reads_b[name]):
                        is_known = any(low <= address < high for low, high in ranges)
                        assert name in ADDRESSES and address > 2**40 and not is_known, name
        return copies[-1]


@pytest.mark.parametrize("name, way", params(CASES, lambda case: case[0] not in LONG))
def test_kernels_read_what_a_fresh_step_would_give_them(name, way, monkeypatch):
    """Whatever changes between two steps; a step like an earlier one copies once for a batch."""
    both = Twice(monkeypatch, name, way)
    optimizer, (first, second) = both.optimizer, both.optimizer.param_groups
    steps = iter(table.gradients(30, SHAPES, way[0]))
    batches = 5  # vectors and matrices of two groups, and a matrix of wide rows
    for _ in range(3):
        both.step(next(steps))
    for rate in (0.5, 2.0):  # a scheduler
        first["lr"] = second["lr"] = rate
        assert both.step(next(steps)) <= batches
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
    both.step(next(steps))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    both.step(next(steps))
    optimizer.update_stats = UpdateStats(2)
    for _ in range(2):
        both.step(next(steps))


def test_the_kernel_has_an_argument_for_each_column():
    names = [name.strip("_") for name in kernels.run.arg_names[:ARGUMENTS]]
    assert names[2:] == [*(x for name in ADDRESSES for x in (name, f"{name}_at")), *NUMBERS]
    assert names[:2] == ["rows", "count"] and [*ARGUMENT] == [*ADDRESSES, *NUMBERS]
    assert all(names[at] == name for name, at in ARGUMENT.items())


def test_arrays_are_copied_once_and_those_of_a_step_with_the_next(monkeypatch):
    memory = launch_memory.Memory(torch.device("cpu"))
    arrays = launch_memory.DeviceArrays(memory)
    one, two, three = (np.full(i, i, dtype=np.int64).tobytes() for i in (1, 2, 3))
    copied = spies.noted(
        monkeypatch, launch_memory.DeviceArrays, "_copy", lambda of, contents: [*contents]
    )
    arrays.begin([one])
    a, b, c = arrays.addresses([two, one, two])
    assert a == c and at(a, 2, np.int64).tolist() == [2, 2] and at(b, 1, np.int64).tolist() == [1]
    arrays.end()
    arrays.memory = memory
    arrays.begin([three])
    arrays.addresses([one, three])
    arrays.end()
    arrays.memory = memory
    arrays.addresses([three])
    assert copied == [[one], [two], [two, one, three], [three]]


def test_a_kernel_is_compiled_again_after_a_change_of_columns(monkeypatch):
    before = launches.KernelConstants(name="apply")
    assert launches.KernelConstants(name="apply") == before
    monkeypatch.setattr(schema, "LAYOUT", schema.LAYOUT + " and another column")
    assert launches.KernelConstants(name="apply") != before
    with pytest.raises(AttributeError, match="no column, form or format LOUDNESS"):
        _ = kernels.fields.LOUDNESS
