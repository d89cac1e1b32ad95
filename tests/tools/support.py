"""The support matrix of docs/support.md: feature × stage × optimizer, from the tests that ran.

A test says what it shows:

    @pytest.mark.supports("clipping", stage="stage", optimizer="rule")    # parameters of the test
    @pytest.mark.supports("clipping", stage=[None, 3], optimizer="CAME")  # values; None: no engine
    @pytest.mark.supports("clipping", stage="fsdp2", optimizer="CAME")  # of fully_shard
    @pytest.mark.supports("clipping", **of(RUNS))  # RUNS[name] has .stage and .rule
    @pytest.mark.supports(lambda name: ..., stage=lambda name: ..., optimizer="CAME")
    @pytest.mark.supports("MiCS", refused="zero_optimization.mics_shard_size")

A function is called with the test's parameters that it names, and gives one value or a list (an
empty one: nothing is shown). Features are those of ``FEATURES``, where a new one takes its place.
What ran is in build/support.json, of which support_table.py makes the pages. When all tests have
run, by `make test` and then `make test-all`, the pages are compared with what the tests showed.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

FEATURES = (
    "fp32, each optimizer against its authors' code",
    "nine BERT classes",
    "tied, shared, unused weights; 0 to 4 dimensions",
    "models built under `zero.Init`",
    "own settings for a parameter group",
    "weight decay by the JSON config",
    "reentrant activation checkpointing",
    "non-reentrant activation checkpointing",
    "`deepspeed.checkpointing`",
    "`torch.compile`",
    "clipping to a norm, gradients not kept",
    "clipping to a norm, gradients kept",
    "clipping by the step before",
    "clipping by value",
    "gradient accumulation",
    "gradient accumulation with clipping",
    "gradient accumulation, projected",
    "bf16 weights",
    "fp16, static loss scale",
    "fp16, dynamic loss scale",
    "`torch_autocast`",
    "parameters that only some ranks use",
    "layers frozen and unfrozen on the way",
    "moving averages of the weights (`ema_decay`)",
    "metrics and monitors",
    "schedulers of DeepSpeed",
    "schedulers of torch",
    "schedulers of Hugging Face",
    "HF Trainer",
    "HF Trainer with LoRA adapters",
    "accelerate's own loop",
    "TRL's GRPO, RLOO and online DPO",
    "save and resume, bit for bit",
    "resume on other ranks and another stage",
    "resume between micro-batches",
    "HF Trainer's resume",
    "`zero_to_fp32.py`",
    "killed ranks, lost hosts, full disks",
    "several hosts",
    "`torch.distributed.checkpoint`, on other ranks",
    "HSDP, meshes of two dimensions",
    "tensor parallelism (torch's)",
    "`MixedPrecisionPolicy`",
    "`reshard_after_forward`",
    "`CPUOffloadPolicy`",
    "tensor parallelism (AutoTP)",
    "tensor parallelism: clipping, accumulation, resume",
    "sequence parallelism (Ulysses)",
    "Hugging Face's mixtures of experts",
    "`deepspeed.moe`, expert parallelism",
    "expert parallelism by AutoEP",
    "expert parallelism with tensor parallelism",
    "pipeline parallelism",
    "pipelines: 16 bits, with a loss scale for fp16",
    "pipelines: resume on other stages and ranks",
    "weights offloaded to the host",
    "states offloaded to the host",
    "weights stored in int8",
    "ZeRO++ hpZ",
    "MiCS",
    "DeepCompile",
    "ZenFlow",
    "SuperOffload",
)
# In the table's order. A rule that is not among them yet is tested, and its name is missing here.
OPTIMIZERS = ("LOMO", "AdaLomo", "Adafactor", "CAME", "LAMB", "GaLoreAdamW", "AdamW")
OPTIMIZERS += ("SCALE", "SinkGD", "FlashAdamW", "Lion", "APOLLO", "APOLLOMini", "Muon")
STAGES = {None: "plain", "fsdp2": "FSDP2", 0: "0", 1: "1", 2: "2", 3: "3"}
WHOLE, QUICK, SLOW = "", "not slow", "slow"  # the expressions of `-m` for all tests, and two parts
REFUSED = "refused"  # in the place of a stage; the setting is in that of the optimizer

Cell = tuple[str, str, str]  # feature, stage, optimizer


def of(table: Mapping[str, Any]) -> dict[str, Callable[[str], Any]]:
    """Stage and optimizer of a test whose parameter ``name`` is a key of ``table``."""
    return {"stage": lambda name: table[name].stage, "optimizer": lambda name: table[name].rule}


def cells(args: tuple[Any, ...], told: Mapping[str, Any], params: Mapping[str, Any]) -> list[Cell]:
    """What a mark with these arguments says of a test with these parameters."""
    told = dict(zip(("feature",), args, strict=False)) | told
    features = _values(told["feature"], params)
    if unknown := [f for f in features if f not in FEATURES]:
        raise ValueError(f"supports: {unknown[0]!r} is not in FEATURES of tests/tools/support.py")
    if REFUSED in told:
        return [(f, REFUSED, told[REFUSED]) for f in features]
    stages = [STAGES[s] for s in _values(told["stage"], params)]
    names = [_full_name(o) for o in _values(told["optimizer"], params)]
    return [(f, s, o) for f in features for s in stages for o in names]


def _full_name(optimizer: str) -> str:
    """An optimizer's name as the table writes it."""
    known = {name.lower(): name for name in OPTIMIZERS}
    if optimizer.lower() in known:
        return known[optimizer.lower()]
    from ds_ext.rules import REGISTRY  # which imports torch, and is not needed otherwise

    return REGISTRY[optimizer.lower()].rule.__name__


def _values(given: Any, params: Mapping[str, Any]) -> list[Any]:
    if callable(given):
        given = given(**{name: params[name] for name in inspect.signature(given).parameters})
    elif isinstance(given, str) and given in params:
        given = params[given]
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


class Collector:
    """The plugin: notes how each marked test ended, in all of xdist's processes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ended: dict[str, dict[str, Any]] = {}  # by test: its outcome and its cells
        self.said: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        try:
            marks = item.iter_markers("supports")
            shown = [cell for mark in marks for cell in cells(mark.args, mark.kwargs, params)]
        except (KeyError, ValueError) as error:
            raise pytest.UsageError(f"{item.nodeid}: supports: {error!r}") from error
        if shown:  # these travel with the report
            item.user_properties.append(("supports", [list(cell) for cell in shown]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        shown = dict(report.user_properties).get("supports")
        if shown is None or hasattr(self.config, "workerinput"):
            return
        before = self.ended.get(report.nodeid, {}).get("outcome")
        if report.when == "call" or report.outcome != "passed":
            outcome = "failed" if before == "failed" else report.outcome
            self.ended[report.nodeid] = {"outcome": outcome, "cells": shown}

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_older = "DS_EXT_TEST_PACKAGES" in os.environ  # which the table is not of
        if hasattr(self.config, "workerinput") or not self.ended or is_older:
            return
        part = self._part(exitstatus)
        path, root = self.config.rootpath / "build" / "support.json", self.config.rootpath
        ran = json.loads(path.read_text()) if path.exists() else {"tests": {}}
        if part in (QUICK, WHOLE):  # a new record begins
            ran = {"tests": {}}
        parts = {*ran.get("parts", ()), part} if part is not None else set()
        full = WHOLE in parts or parts >= {QUICK, SLOW}
        ran = {"full": full, "parts": sorted(parts), "tests": ran["tests"] | self.ended}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(ran))
        claims = root / "tests" / "tools" / "support.json"
        if part is None or not claims.exists():
            return
        claimed, wrong = json.loads(claims.read_text()), False
        if full:
            self.said, wrong = compare(claimed, summary(ran))
        elif part == QUICK:
            shown = {feature for ended in ran["tests"].values() for feature, *_ in ended["cells"]}
            lost = sorted(claimed["cells"].keys() - shown)
            self.said = [f"docs/support.md claims {f}: `make test` has no test of it" for f in lost]
            wrong = bool(lost)
        if wrong:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.said:
            terminalreporter.section("support matrix")
            for line in self.said:
                terminalreporter.line(line)

    def _part(self, exitstatus: int) -> str | None:
        """Which of the parts that make up all tests was run; None: what somebody chose."""
        option, here = self.config.option, self.config.invocation_params.dir
        names = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly")
        if any(getattr(option, name, None) for name in names):
            return None
        everything = {(here / arg).resolve() for arg in self.config.args}
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        is_part = ended and everything == {self.config.rootpath / "tests"}
        return option.markexpr if is_part and option.markexpr in (WHOLE, QUICK, SLOW) else None


def summary(ran: Mapping[str, Any]) -> dict[str, Any]:
    """What the tests that ran show: how each cell fared, and in which files a feature is tested."""
    fared: dict[str, dict[str, dict[str, str]]] = {f: {} for f in FEATURES}
    files: dict[str, set[str]] = {f: set() for f in FEATURES}
    for test, ended in ran["tests"].items():
        for feature, stage, optimizer in ended["cells"]:
            row = fared.setdefault(feature, {}).setdefault(stage, {})
            row[optimizer] = max(row.get(optimizer, ""), ended["outcome"], key=_WEIGHT.index)
            files.setdefault(feature, set()).add(test.split("::")[0])
    return {
        "full": ran["full"],
        "cells": {f: _sorted(stages) for f, stages in fared.items() if stages},
        "files": {f: sorted(names) for f, names in files.items() if names},
    }


_WEIGHT = ("", "skipped", "passed", "failed")  # one failure outweighs all that passed


def _sorted(stages: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return {s: dict(sorted(stages[s].items())) for s in sorted(stages)}


def compare(claimed: Mapping[str, Any], shown: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What the document claims and a full run did not show, in words; whether that is a fault."""
    said, wrong = [], False
    for feature, stages in claimed["cells"].items():
        for stage, row in stages.items():
            now = shown["cells"].get(feature, {}).get(stage, {})
            for optimizer in (o for o, fared in row.items() if fared == "passed"):
                outcome = now.get(optimizer, "not tested")
                if outcome != "passed":
                    wrong |= outcome != "skipped"
                    at = optimizer if stage == REFUSED else f"stage {stage}, {optimizer}"
                    said.append(f"docs/support.md claims {feature}, {at}: {outcome} in this run")
    if wrong:
        said.append("make matrix writes into docs/support.md what this run showed.")
    return said, wrong
