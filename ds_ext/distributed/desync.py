"""Detects ZeRO-3 ranks that use modules in different orders.

A collective accepts whatever tensors the ranks pass. If they are of different parameters, the
result is silently wrong; if their sizes differ, it fails or hangs. So the hosts compare a hash of
what comes next: of every bucket of gradients and, in the first pass, of every gathered module.
Later passes in another order are detected if their gradients differ.
"""

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from ds_ext.distributed import consensus
from ds_ext.distributed.groups import Group


class OrderCheck:
    """Compares the order of the ranks of ``group``, and raises RuntimeError on all if it differs.

    Without ``ahead``, no bucket that differs between ranks is reduced. With ``ahead``, the host
    reads the result for a bucket at the next comparison, so one such bucket may be reduced and
    stepped before the error is raised.
    """

    def __init__(
        self, module: nn.Module, names: Mapping[Tensor, str], group: Group, ahead: bool = False
    ) -> None:
        self.names = names
        self.group = group
        self.ahead = ahead
        self.number = {p: i for i, p in enumerate(names)}
        self.modules = {m: (i, name) for i, (name, m) in enumerate(module.named_modules())}
        self.asked: tuple[Callable[[], bool], Callable[[], list[str]]] | None = None

    def check_gradients(self, waiting: Mapping[Tensor, bool], ended: bool) -> int:
        """Compares the parameters of a bucket over the ranks; returns the bytes sent.

        It also compares which of them may have further partial gradients, and whether backward has
        ended.
        """
        bucket = dict(waiting)

        def words() -> list[str]:
            more = ", which may have further parts"
            said = [f"the gradient of {self.names[p]}{more * m}" for p, m in bucket.items()]
            return [*said, "the end of backward" if ended else "a full bucket"]

        self._begin_comparison((ended, *(2 * self.number[p] + m for p, m in bucket.items())), words)
        if ended or not self.ahead:
            self._end_comparison()
        return consensus.MESSAGE if consensus.several(self.group) else 0

    def watch_first_pass(self, coordinator: Any) -> None:
        """Compares each module that DeepSpeed gathers, until DeepSpeed has recorded a pass."""
        fetch = coordinator.fetch_sub_module

        def fetch_sub_module(module: nn.Module, forward: bool) -> None:
            if coordinator.is_complete_trace():
                del coordinator.fetch_sub_module
            else:
                number, name = self.modules.get(module, (-1, "a module outside the model"))
                words = f"the {'forward' if forward else 'backward'} pass of {name or 'the model'}"
                self._begin_comparison((2 * number + forward,), lambda: [words])
                self._end_comparison()
            fetch(module, forward)

        coordinator.fetch_sub_module = fetch_sub_module

    def _begin_comparison(self, numbers: tuple[int, ...], words: Callable[[], list[str]]) -> None:
        self._end_comparison()  # the comparison before
        self.asked = consensus.begin_comparison(numbers, self.group), words

    def _end_comparison(self) -> None:
        """Waits for the comparison in progress; raises RuntimeError if the ranks differ."""
        asked, self.asked = self.asked, None
        if asked is None:
            return
        are_alike, words = asked
        if are_alike():
            return
        told = consensus.gathered(words(), self.group)
        other = next(rank for rank, said in enumerate(told) if said != told[0])
        pairs = zip_longest(told[0], told[other], fillvalue="nothing")
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise RuntimeError(
            f"the ranks run different parts of the model: next is {first} on rank 0, and "
            f"{second} on rank {other}. At zero_optimization.stage 3 all ranks must use the same "
            "modules in the same order: pass modules that only some ranks use to "
            "deepspeed.utils.set_z3_leaf_modules, or set stage 2, 1 or 0, which do not need it."
        )
