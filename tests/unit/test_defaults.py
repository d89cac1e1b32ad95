"""torch's default dtype and device are the user's: no step depends on them, no memory is made by
them."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ds_ext
from ds_ext.ops import quantize, rounding
from ds_ext.optimizer import OPTIMIZERS
from tests.common import needs, paths, plain, table
from tests.common.choose import params
from tests.common.hypers import FOR_ALL
from tests.unit.test_kernels import SETTINGS

SHAPES = ((), (300,), (13, 40), (3, 7, 20))
GALORE = {"lr": 0.02, "rank": 3, "update_proj_gap": 2}
CASES = {name: (name, SETTINGS[name]) for name in FOR_ALL} | {
    "projected": ("galoreadamw", GALORE),
    "8 bits": ("galoreadamw", GALORE | {"nbits": 8, "min_8bit_size": 16}),
}
MAKERS = {
    *("tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye"),
    *("rand", "randn", "randint", "randperm", "as_tensor", "scalar_tensor", "empty_strided"),
}

TABLES = ("ops", "kernels") if needs.TRITON else ("ops",)
# Kernels: rules that ask for different passes, of which `make test` runs two.
KERNELS, FEW = ("lomo", "adalomo", "lamb", "flashadamw", "8 bits"), ("lomo", "8 bits")
WAYS = [way for way in itertools.product(CASES, TABLES) if way[1] == "ops" or way[0] in KERNELS]


@pytest.fixture
def defaults():
    """Sets a default dtype, and a device on which nothing can be computed."""

    def forget():
        for cached in (rounding.shifted_noise, quantize._book):
            cached.cache_clear()

    def turn(on):
        torch.set_default_dtype(torch.bfloat16 if on else torch.float32)
        torch.set_default_device("meta" if on else None)

    forget()
    yield turn
    turn(False)
    forget()


STORED = pytest.mark.parametrize(
    "dtype, mode", [(torch.float32, "nearest"), (torch.bfloat16, "master")]
)


@pytest.mark.parametrize("case, path", params(WAYS, lambda way: way[1] == "ops" or way[0] in FEW))
@STORED
def test_steps_have_the_same_bits(case, path, dtype, mode, defaults, monkeypatch):
    """Trains by a rule with torch's defaults and with others, and compares the weights."""
    paths.use(monkeypatch, path)
    if "8 bits" in case:
        pytest.importorskip("bitsandbytes")
    name, hypers = CASES[case]

    def trained(on):
        params = [nn.Parameter(p) for p in table.weights(SHAPES, dtype)]
        gradients = table.gradients(2, SHAPES, dtype)
        optimizer = OPTIMIZERS[name](params, **hypers, weight_update=mode)
        defaults(on)
        plain.steps(optimizer, params, gradients)
        defaults(False)
        return [p.detach() for p in params]

    assert all(map(torch.equal, trained(True), trained(False)))


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """Calls of the package to functions of ``torch``."""
    for path in sorted(Path(ds_ext.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and ast.unparse(node.func.value) == "torch":
                yield path, node


def test_nothing_is_allocated_without_a_dtype_and_a_device():
    found = []
    for path, call in calls():
        given = {keyword.arg for keyword in call.keywords}  # None for a mapping
        if call.func.attr in MAKERS and None not in given and not {"dtype", "device"} <= given:
            found.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
        # of two numbers it makes a tensor of the default dtype
        if call.func.attr == "where" and all(
            isinstance(x, ast.Constant) or ast.unparse(x).isupper() for x in call.args[1:]
        ):
            found.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
    assert not found, "\n".join(found)
