"""A type checker sees the optimizers' names and hyper-parameters."""

import inspect
import re
from pathlib import Path

import pytest

import ds_ext
from ds_ext.hyperparams import names
from ds_ext.optimizer import OPTIMIZERS
from tests.common import apart

ROOT = Path(__file__).parents[2]
GOOD = """import ds_ext
import torch

model = torch.nn.Linear(2, 2)
params = model.parameters()
ds_ext.AdaLomo(params, lr=1e-3, eps=(1e-30, 1e-3), weight_update="nearest")
fused: ds_ext.RuleOptimizer = ds_ext.GaLoreAdamW.for_model(model, rank=4, others={})
"""
WRONG = {  # and what mypy calls it
    "ds_ext.AdaLomoo(params)": "attr-defined",
    "ds_ext.AdaLomo(params, learning_rate=1e-3)": "call-arg",
    "ds_ext.AdaLomo(params, lr='1e-3')": "arg-type",
    "ds_ext.Muon(params, ns_dtype='fp64')": "arg-type",
    "ds_ext.Muon.for_model(model, momentun=0.9)": "call-arg",
    "ds_ext.AdaLomo.for_model(model, others={})": "call-arg",
    "ds_ext.fuse_into_backward(model, fused, gradient_policy='shared')": "arg-type",
    "ds_ext.fuse_into_backward(model, fused, clip_mode='before')": "arg-type",
}
FIRST = GOOD.count("\n") + 1  # line of the first mistake


@pytest.mark.slow
def test_mypy_finds_misspelt_names(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(GOOD + "\n".join(WRONG) + "\n")
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache'}"]
    own = {"MYPYPATH": str(ROOT), "PYTHONPATH": None}
    told = apart.python("-m", "mypy", *options, program, cwd=tmp_path, fails=True, **own).stdout
    lines = [line for line in told.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in lines] == list(range(FIRST, FIRST + len(WRONG)))
    assert all(f"[{kind}]" in line for line, kind in zip(lines, WRONG.values(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_help_has_each_hyper_parameter_with_its_meaning(name):
    written = re.findall(r"(?m)^    (\w+): .+\.$", inspect.getdoc(OPTIMIZERS[name]))
    assert written == ["params", *names(OPTIMIZERS[name].hypers)]


def test_signatures_are_written_and_names_are_listed():
    signature = str(inspect.signature(ds_ext.AdaLomo))
    assert signature.startswith("(params, *, lr: float = 0.001, eps: tuple[float, float] = ")
    assert "FieldInfo" not in signature
    public = {*ds_ext.__all__, "FuseCallback", "MetricsCallback"}
    assert {"AdaLomo", "fuse_into_backward"} <= public
    assert {name for name in dir(ds_ext) if name[0] != "_"} == public


def test_a_misspelt_optimizer_is_corrected():
    with pytest.raises(AttributeError, match="no attribute 'AdaLom'. Did you mean AdaLomo"):
        ds_ext.AdaLom  # noqa: B018
