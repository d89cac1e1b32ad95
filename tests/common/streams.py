"""Simulated streams of a GPU: plain tensors, and clocks that tell which operation waits for which.

Operations of torch run at once. Each is noted on the current stream, with what it reads and writes.
A stream's clock holds, for each stream, the last operation that it waits for. An operation that
touches memory without waiting for the operation that wrote it is an error. So is an operation that
allocates memory if its stream could reuse memory that others still use: freed memory that this
stream allocated, where it does not wait for all uses.
Tensors of up to ``SMALL`` bytes are not followed, because some of them lie on the host.
"""

import contextlib
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_ext.backward import streams

SMALL = 128


class Stream:
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, gpu, name):
        self.gpu, self.name, self.clock = gpu, name, Counter()
        self.freed = set()  # uses of memory that this stream allocated, and may reuse

    def wait_event(self, event):
        self.clock |= event

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self, *_):
        return self.clock.copy()

    def run(self):
        """Notes an operation -> its time on this stream."""
        self.clock[self.name] += 1
        return self.name, self.clock[self.name]

    def waits_for(self, use):
        """Whether what is launched now waits for a use."""
        name, time = use
        return self.clock[name] >= time


class Storage:
    """Memory: who allocated it, wrote it last, and has read it since."""

    def __init__(self, storage, stream):
        self.alive, self.stream, self.nbytes = StorageWeakRef(storage), stream, storage.nbytes()
        self.written, self.read = (stream.name, 0), set()

    @property
    def uses(self):
        return {self.written, *self.read}


class GPU(TorchDispatchMode):
    """Simulates the streams of a GPU while it is active.

    Attributes:
        errors: what happened too early.
        reductions: the clock of each all-reduce of gradients when it was launched.
        peak: most bytes alive that the compute stream, which runs backward, has allocated.
    """

    def __init__(self):
        super().__init__()
        self.current = self.compute = Stream(self, "compute")
        self.others = 0
        self.queues = {}  # of process groups
        self.storages = {}
        self.errors, self.reductions = [], []
        self.peak = self.bytes = 0

    def stream(self, device=None):
        self.others += 1
        return Stream(self, f"side {self.others}")

    @contextlib.contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def look_for_freed(self):
        """Gives memory that was freed since the last call back to the stream that allocated it."""
        for key, storage in [*self.storages.items()]:
            if storage.alive.expired():
                del self.storages[key]
                self.bytes -= storage.nbytes * (storage.stream is self.compute)
                storage.stream.freed |= storage.uses

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.look_for_freed()
        if func.is_view:
            return func(*args, **(kwargs or {}))
        stream = self.current
        if func.namespace == "c10d":
            group = next(x for x in args if isinstance(x, torch.ScriptObject))
            name = dist.ProcessGroup.unbox(group).group_name
            stream = self.queues.setdefault(name, Stream(self, f"group {name}"))
            stream.clock |= self.current.clock
            if func.overloadpacket.__name__ == "allreduce_coalesced_":
                self.reductions.append(stream.clock.copy())
        before = {s._cdata for s in storages((args, kwargs))}
        for storage in storages((args, kwargs)):
            self.storages.setdefault(storage._cdata, Storage(storage, self.compute))
        result = func(*args, **(kwargs or {}))
        use = stream.run()
        written = {s._cdata for s in storages(writes(func, args, kwargs or {}))}
        for storage in storages((args, kwargs, result)):
            known = self.storages.get(storage._cdata)
            if known is None or known.alive.expired():
                known = self.storages[storage._cdata] = Storage(storage, stream)
                self.bytes += known.nbytes * (stream is self.compute)
                self.peak = max(self.peak, self.bytes)
                early = {freed for freed in stream.freed if not stream.waits_for(freed)}
                self.errors += [f"{stream.name} may reuse memory of {freed}" for freed in early]
                stream.freed.clear()
            is_written = storage._cdata in written or storage._cdata not in before
            for earlier in known.uses if is_written else {known.written}:
                if not stream.waits_for(earlier):
                    self.errors.append(f"{func} on {stream.name} does not wait for {earlier}")
            if is_written:
                known.written, known.read = use, set()
            else:
                known.read.add(use)
        return result

    def waiting(self, wait):
        """``Work.wait``, for which the current stream waits too: for all that was launched."""

        def waited(work, *timeout):
            for queue in self.queues.values():
                self.current.wait_stream(queue)
            return wait(work, *timeout)

        return waited


def storages(values):
    """The storages of tensors in a tree of values."""
    found = [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return [storage for storage in found if storage.nbytes() > SMALL]


def writes(func, args, kwargs):
    """The arguments that an operation writes to."""
    if func.namespace == "c10d":
        return args
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


@contextlib.contextmanager
def buckets_held():
    """Buckets stay in memory as long as a GPU's streams hold them; all runs in line."""
    stream = mock.Mock()
    with (
        mock.patch.object(streams, "WITH_STREAMS", {"cpu"}),
        mock.patch.object(torch.cuda, "Stream", lambda *_: stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: stream),
        mock.patch.object(torch.cuda, "stream", lambda _: contextlib.nullcontext()),
    ):
        yield


@contextlib.contextmanager
def simulated():
    """A GPU whose memory is the host's."""
    gpu = GPU()
    with (
        mock.patch.object(streams, "WITH_STREAMS", {"cpu"}),
        mock.patch.object(torch.cuda, "Stream", gpu.stream),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: gpu.current),
        mock.patch.object(torch.cuda, "stream", gpu.use),
        mock.patch.object(dist.Work, "wait", gpu.waiting(dist.Work.wait)),
        mock.patch.object(FakeWork, "wait", gpu.waiting(FakeWork.wait)),
        gpu,
    ):
        yield gpu
