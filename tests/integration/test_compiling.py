"""Every kernel that the optimizers ask for compiles for an H200, wherever the tests run."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from ds_ext import ops
from ds_ext.ops.executors.triton import launches
from ds_ext.ops.shard import Shard
from ds_ext.optimizer import OPTIMIZERS
from ds_ext.optimizer.nonfinite import GradCheck, GradFlags
from ds_ext.optimizer.selftest import Alone
from ds_ext.optimizer.update_stats import UpdateStats
from ds_ext.optimizer.updates import RunUpdate
from tests.common import apart, needs, paths
from tests.common.hypers import FOR_ALL
from tests.integration.compiling_jobs import plain
from tests.unit.test_kernels import SETTINGS

pytestmark = needs.nvidia
OLDEST = Path(sys.prefix) / "oldest" / "triton_alone"
TTSEM = Path(sys.prefix) / "ir"  # which executes compiled IR: see tests/tools/ir.py
MODES = {torch.float32: ("nearest",)}
MODES |= {torch.bfloat16: ("stochastic", "nearest", "master", "master24")}
MODES |= {torch.float16: ("stochastic", "nearest", "master", "master24")}
ALIGNED, ODD = ((4, 64), (64,)), ((4, 5), (5,))


def asked_for(monkeypatch) -> list:
    """What the optimizers ask for -> [[label, warps, constants], ...].

    Of all, which would take minutes, as many as show each pass with each value of a constant, with
    each form of what is aligned or not, and with each way to keep each weight.
    """
    found, seen = [], set()

    def note(launch, *args):
        shown = {*pairs_of(launch.kind)}
        if not shown <= seen:
            seen.update(shown)
            found.append([launch.kind.name, launch.warps, launches.constants(launch.kind, 16)])

    monkeypatch.setattr(launches, "launch_kernel", note)
    paths.use(monkeypatch, "kernels")
    for name in FOR_ALL:
        for dtype, modes in MODES.items():
            for mode in modes:
                for shapes in (ALIGNED, ODD):
                    step(name, dtype, mode, shapes)
    for dtype, modes in MODES.items():
        for mode in modes:
            step("lomo", dtype, mode, ALIGNED, UpdateStats(1))
    return found


def pairs_of(one):
    named = {key: repr(x) for key, x in one.fields.items() if key != "name"}
    pairs = [(key, key) for key in named] + [("FORM", "ALIGNED"), ("WD", "STORAGE")]
    return [(one.name, a, named.get(a), named.get(b)) for a, b in pairs]


def step(name, dtype, mode, shapes, meter=None):
    """Steps whose kernels do nothing, the second of gradients that they judge.

    Ranks hold parts of rows of the last matrix.
    """
    params = [torch.nn.Parameter(torch.ones(s, dtype=dtype)) for s in (*shapes, shapes[0])]
    optimizer = OPTIMIZERS[name](params, **SETTINGS[name], weight_update=mode)
    optimizer.update_stats = meter
    shards = [Shard.whole(tuple(p.shape)) for p in params]
    shards[-1] = Shard(tuple(params[-1].shape), 0, params[-1].numel() // 8 * 4, 16)
    runs = [torch.ones(len(s), dtype=dtype) for s in shards]
    first = optimizer.first_round_checks(dict(zip(params, shards, strict=True)))
    batched = optimizer.in_batches(dict(zip(params, shards, strict=True)), torch.device("cpu"))
    votes = {p: torch.ones(()) for p in batched if p not in first}
    for bound, judge in ((1.0, None), (None, GradCheck(first, votes, GradFlags()))):
        updates = [
            RunUpdate(p, run, ops.Scaled(run, 0.5, bound), s)
            for p, s, run in zip(params, shards, runs, strict=True)
        ]
        with torch.no_grad():
            optimizer.update(updates, Alone(), judge)
            optimizer.commit_weight_norms()


COUNTS = """
import json
from benchmarks import sass
asked = sass.passes_of_step("adalomo")
print(json.dumps([[*map(sass.row, asked)], sum(map(sass.bytes_of, asked))]))
"""


@pytest.mark.slow
def test_the_kernels_of_a_7b_step_have_few_instructions_and_registers():
    """Of AdaLomo: without calls for divisions of 64 bits, and without spilled registers."""
    passes, moved = json.loads(compiling(None, "-c", COUNTS).splitlines()[-1])
    assert 8 <= moved / 6.738e9 <= 9  # bytes of each weight: two reads of g, one of w, a write of w
    assert not any(row["spilled"] for row in passes)
    of = {row["pass"]: row for row in passes}
    recall, applied = of["cached_norm IS_WEIGHT"], of["apply_and_cache_norm IS_QUOTIENT"]
    assert recall["calls"] == 0 and recall["registers"] <= 80
    assert applied["calls"] == 0 and applied["registers"] <= 80
    assert applied["per element"] <= 34.5 and applied["alu"] <= 15
    assert applied["scalars"] <= 24  # the noise is loaded in vectors


@pytest.mark.slow
def test_kernels_compile_and_read_vectors_where_runs_are_aligned(monkeypatch, tmp_path):
    asked = asked_for(monkeypatch)
    assert {name for name, *_ in asked} == {
        *("square_sums", "row_col_sums", "weighted_sums", "lerp", "square_lerp", "apply", "fold"),
        *("factors", "clipped_factors"),
        *("apply_and_cache_norm", "cached_norm"),
    }
    written = [[label, warps, {k: plain(x) for k, x in of.items()}] for label, warps, of in asked]
    compiling(tmp_path, "-m", "tests.integration.compiling_jobs", given=json.dumps(written))


def compiling(cache, *args, given="", path=""):
    """Runs Python without Triton's interpreter, with a folder of packages -> what it prints."""
    own = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": cache and str(cache)}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), str(apart.ROOT))))
    return apart.python(*args, given=given, **own).stdout


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="Triton 3.5 is installed by `make test-all`")
def test_the_oldest_triton_compiles_vectors(tmp_path):
    """Triton before 3.9 loses hints to alignment that a function returns."""
    told = compiling(tmp_path, "-c", COUNTS, path=OLDEST)
    of = {row["pass"]: row for row in json.loads(told.splitlines()[-1])[0]}
    applied = of["apply_and_cache_norm IS_QUOTIENT"]
    assert applied["scalars"] <= 24 and applied["per element"] <= 36 and not applied["spilled"]
    assert of["square_lerp IS_RUN"]["per element"] <= 25  # of single elements: 41


ENCODE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from benchmarks import machine_code
from ds_ext.ops.executors.triton import kernels, tiles
kinds = dict(values="*bf16", codes="*i8", exponents="*u8", noise="*i32", groups="i32", start="i64")
kinds |= dict(key="i64") | dict.fromkeys(("IS_RANDOM", "SIZE", "GROUPS"), "constexpr")
for is_random in (False, True):
    constants = {"IS_RANDOM": is_random, "SIZE": 32, "GROUPS": tiles.ENCODED_GROUPS}
    constants = {(kernels.encode.arg_names.index(name),): x for name, x in constants.items()}
    source, target = ASTSource(kernels.encode, kinds, constants), GPUTarget("cuda", 90, 32)
    print(machine_code.counts_of(triton.compile(source, target=target).asm["cubin"]).spilled)
kinds = dict(stored="*i8", values="*bf16", groups="i32", length="i64")
constants = {(4,): 32, (5,): tiles.DECODED_GROUPS}
source = ASTSource(kernels.decode, kinds | dict(SIZE="constexpr", GROUPS="constexpr"), constants)
print(machine_code.counts_of(triton.compile(source, target=target).asm["cubin"]).spilled)
"""


@pytest.mark.slow
def test_the_kernels_of_8_bit_weights_compile(tmp_path):
    assert compiling(tmp_path, "-c", ENCODE).split() == ["0", "0", "0"]


COUNT = """
import json, sys
from benchmarks import machine_code, sass
asked = [one for one in sass.passes_of_step(sys.argv[1]) if one.kind.name == "apply"]
sizes = [machine_code.counted(one.kind, one.warps).size for one in asked]
print(json.dumps([*zip(map(sass.row, asked), sizes)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, most", [("flashadamw", 92)])
def test_8_bit_moments_take_few_instructions(name, most, tmp_path):
    """With what rounds weights stochastically. No root or division calls a function."""
    ((row, size),) = json.loads(compiling(tmp_path, "-c", COUNT, name))
    assert row["per element"] <= most and row["registers"] <= 150 and not row["spilled"]
    assert row["scalars"] <= 20  # the noise is loaded in vectors
    # two divisions of addresses
    assert row["calls"] <= 2 and size <= 1.25 * most * 32, (row, size)


STEPS = "tests/unit/test_kernels.py::test_a_step_is_that_of_the_ops"
NUMBERS = "tests/unit/test_native.py::test_every_number_is_written_as_the_ops_write_it"
CASES = (f"{STEPS}[lomo-3-fp32-nearest]", f"{STEPS}[lomo-2-fp16-nearest]")
CASES += (f"{NUMBERS}[dtype9-stochastic-kernels-5]",)


@pytest.mark.slow
@pytest.mark.skipif(not TTSEM.is_dir(), reason="ttsem is installed by `make test-all`")
def test_executed_ir_of_kernels_has_the_results_of_the_ops():
    told = compiling(None, "-m", "pytest", "-q", "-p", "tests.tools.ir", *CASES, path=TTSEM)
    counted = re.search(r"(\d+) launches executed.* (\d+) of them not", told)
    launches, unchecked = map(int, counted.groups())
    assert launches >= len(CASES) and unchecked == 0
