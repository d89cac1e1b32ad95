"""PyTorch's operations on a GPU: how many, in how much memory, and without waiting for the device.

Tensors on "meta" stand for those of a GPU: a number that the host reads raises an error there.
"""

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ext.ops import block_sizes
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.planner.live_memory import LiveMemory
from ds_ext.rules import REGISTRY
from tests.common.choose import crossed
from tests.common.states import tensors
from tests.worlds import ROOT

NO_LAUNCH = {"empty", "empty_like", "new_empty", "detach", "_unsafe_view"}  # and views
DTYPES = (torch.float32, torch.bfloat16)
# Muon iterates on all equal matrices of a bucket together.
LINEAR = sorted(REGISTRY.keys() - {"muon"})
MOST = 256 * 2**20 + 64  # bytes of a step's temporary tensors: blocks, and some numbers


class Operations(TorchDispatchMode):
    """Counts the operations that would launch a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.count += not (func.is_view or "::" in name or name in NO_LAUNCH)
        return func(*args, **(kwargs or {}))


def stepped(name, shape, dtype, n=1):
    """An optimizer of n parameters that has made a step, and its tensors."""
    params = [nn.Parameter(torch.zeros(shape, device="meta", dtype=dtype)) for _ in range(n)]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer = OPTIMIZERS[name](params)
    optimizer.step()
    return optimizer, [*params, *(p.grad for p in params), *tensors([*optimizer.state.values()])]


def operations(name, dtype, n):
    optimizer, _ = stepped(name, (512, 512), dtype, n)
    with Operations() as mode:
        optimizer.step()
    return mode.count


def documented():
    """Operations of a parameter in fp32 and in bf16, by optimizer."""
    text = (ROOT / "docs/gpu.md").read_text().partition("## Without kernels")[2]
    rows = re.findall(r"^\| (\w[\w-]*) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    return {name.lower().replace("-", ""): (int(a), int(b)) for name, a, b in rows}


def test_the_documentation_has_a_row_for_each_optimizer():
    assert sorted(documented()) == LINEAR


@pytest.mark.parametrize("name", LINEAR)
def test_a_parameter_takes_about_the_documented_number_of_operations(name):
    for dtype, expected in zip(DTYPES, documented()[name], strict=True):
        found = (operations(name, dtype, 3) - operations(name, dtype, 1)) / 2
        assert abs(found - expected) <= 2 + expected / 20, dtype


@pytest.mark.parametrize("name, dtype", crossed(OPTIMIZERS, zip(DTYPES)))
def test_a_step_reads_no_number_of_the_device_and_needs_little_memory(name, dtype):
    optimizer, kept = stepped(name, (4 * 4096, 6144), dtype)  # twelve blocks
    assert kept[0].numel() == 12 * block_sizes.SLICE
    with LiveMemory(kept) as watch:
        before = watch.now
        optimizer.step()
    if name != "muon":  # whose products need memory of the matrix's size
        assert watch.most - before <= MOST
    optimizer.zero_grad()
