"""The support matrix, docs/support.md and docs/tests-by-feature.md, from the marks of the tests.

A test says what it shows:

    @pytest.mark.supports("clipping", stage="stage", optimizer="rule")    # parameters of the test
    @pytest.mark.supports("clipping", stage=[None, 3], optimizer="CAME")  # values; None: no engine
    @pytest.mark.supports("clipping", stage="fsdp2", optimizer="CAME")  # of fully_shard
    @pytest.mark.supports("clipping", **of(RUNS))  # RUNS[name] has .stage and .rule
    @pytest.mark.supports(lambda name: ..., stage=lambda name: ..., optimizer="CAME")

A function is called with the test's parameters that it names, and gives one value or a list (an
empty one: nothing is shown). Features are those of ``FEATURES``, where a new one takes its place.
`make matrix` writes the pages from all tests that pytest collects, slow ones too; in `make test`,
test_snippets.py fails if the pages say anything else.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tools import blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/support.md"
BY_STAGE = ROOT / "docs/tests-by-feature.md"

FEATURES = (
    "fp32, each optimizer against its authors' code",
    "the nine BERT model classes",
    "tied, shared, unused weights; 0 to 4 dimensions",
    "models built under `zero.Init`",
    "hyper-parameters per parameter group",
    "weight decay set in the JSON config",
    "reentrant activation checkpointing",
    "non-reentrant activation checkpointing",
    "`deepspeed.checkpointing`",
    "`torch.compile`",
    'clipping by norm, `"fused"`',
    'clipping by norm, `"sharded"`',
    "clipping by the previous step's norm",
    "clipping by value",
    "gradient accumulation",
    "gradient accumulation with clipping",
    "bf16 weights",
    "fp16, static loss scale",
    "fp16, dynamic loss scale",
    "`torch_autocast`",
    "parameters used by only some ranks",
    "freezing and unfreezing layers",
    "moving averages of the weights (`ema_decay`)",
    "metrics and monitors",
    "schedulers of DeepSpeed",
    "schedulers of torch",
    "schedulers of Hugging Face",
    "HF Trainer",
    "HF Trainer with LoRA adapters",
    "accelerate, your own loop",
    "TRL's GRPO, RLOO and online DPO",
    "save and resume, bit-identical",
    "resume with other ranks and ZeRO stage",
    "HF Trainer's resume",
    "`zero_to_fp32.py`",
    "killed ranks, lost hosts, full disks",
    "several hosts",
    "`torch.distributed.checkpoint`",
    "HSDP",
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
    "pipelines: bf16, fp16",
    "pipelines: resume with other stages",
    "weights offloaded to the host",
    "states offloaded to the host",
    "weights stored in int8",
    "ZeRO++ hpZ",
)
# In the table's order. A rule that is not among them yet is tested, and its name is missing here.
OPTIMIZERS = ("LOMO", "AdaLomo", "Adafactor", "CAME", "LAMB", "GaLoreAdamW", "AdamW")
OPTIMIZERS += ("SCALE", "SinkGD", "FlashAdamW", "Lion", "APOLLO", "APOLLOMini", "Muon")
STAGES = {None: "plain", "fsdp2": "FSDP2", 0: "0", 1: "1", 2: "2", 3: "3"}
ALL, EXCEPT = "✓", "✓ except "

Cell = tuple[str, str, str]  # feature, stage, optimizer
Stages = dict[str, set[str]]  # the optimizers of a feature by stage


def of(table: Mapping[str, Any]) -> dict[str, Callable[[str], Any]]:
    """Stage and optimizer of a test whose parameter ``name`` is a key of ``table``."""
    return {"stage": lambda name: table[name].stage, "optimizer": lambda name: table[name].rule}


def cells(args: tuple[Any, ...], told: Mapping[str, Any], params: Mapping[str, Any]) -> list[Cell]:
    """What a mark with these arguments says of a test with these parameters."""
    told = dict(zip(("feature",), args, strict=False)) | told
    features = _values(told["feature"], params)
    if unknown := [f for f in features if f not in FEATURES]:
        raise ValueError(f"supports: {unknown[0]!r} is not in FEATURES of tests/tools/support.py")
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
    """The plugin: what all tests that pytest collects show, also those that it then deselects."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, Cell]] = []  # each with the file of the test
        self.files: set[str] = set()
        self.has_skipped = False  # modules that need a package that is missing here

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        file = item.nodeid.split("::")[0]
        self.files.add(file)
        try:
            for mark in item.iter_markers("supports"):
                self.shown += [(file, cell) for cell in cells(mark.args, mark.kwargs, params)]
        except (KeyError, ValueError) as error:
            raise pytest.UsageError(f"{item.nodeid}: supports: {error!r}") from error

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.has_skipped |= report.skipped


def matrix(shown: Iterable[tuple[str, Cell]]) -> str:
    rows = []
    for feature, stages, _ in _by_feature(shown):
        told = [s for s in STAGES.values() if s in stages]
        rows.append([feature, _where(told), _optimizers([stages[s] for s in told])])
    return blocks.table(["feature", "works with", "tested optimizers"], rows)


def by_stage(shown: Iterable[tuple[str, Cell]]) -> str:
    """The page docs/tests-by-feature.md: a column for each stage, and the files of the tests."""
    lines = ["# Tests by feature", ""]
    lines += ["Generated by `make matrix` from the marks of the tests.", ""]
    lines += ["✓: tested with every optimizer. Names: only with these. Blank: not tested.", ""]
    rows = []
    for feature, stages, files in _by_feature(shown):
        links = [f"[{Path(file).stem[5:]}](../{file})" for file in sorted(files)]
        columns = [_cell(stages.get(stage, set())) for stage in STAGES.values()]
        rows.append([feature, *columns, ", ".join(links)])
    heads = ["without DeepSpeed", "FSDP2", *(f"ZeRO-{stage}" for stage in range(4))]
    return "\n".join([*lines, blocks.table(["feature", *heads, "test files"], rows)]) + "\n"


def _by_feature(shown: Iterable[tuple[str, Cell]]) -> list[tuple[str, Stages, set[str]]]:
    """Each feature with its optimizers by stage, and the files of its tests."""
    stages: dict[str, Stages] = {feature: {} for feature in FEATURES}
    files: dict[str, set[str]] = {feature: set() for feature in FEATURES}
    for file, (feature, stage, optimizer) in shown:
        stages[feature].setdefault(stage, set()).add(optimizer)
        files[feature].add(file)
    return [(feature, stages[feature], files[feature]) for feature in FEATURES if stages[feature]]


def _where(shown: Sequence[str]) -> str:
    """Stages in words."""
    zero = [s for s in shown if s.isdigit()]
    is_range = len(zero) > 2 and int(zero[-1]) - int(zero[0]) == len(zero) - 1
    numbers = f"{zero[0]}–{zero[-1]}" if is_range else ", ".join(zero)
    found = [f"ZeRO-{numbers}"] * bool(zero)
    found += ["FSDP2"] * ("FSDP2" in shown) + ["plain PyTorch"] * ("plain" in shown)
    return "everything" if len(shown) == len(STAGES) else "; ".join(found)


def _optimizers(stages: Sequence[set[str]]) -> str:
    """The optimizers of a feature, at whichever of its stages."""
    every = set().union(*stages)
    text = _cell(every).replace(EXCEPT, "all except ").replace(ALL, "all")
    return text if all(own == every for own in stages) else f"{text}*"


def _cell(tested: set[str]) -> str:
    others = [name for name in OPTIMIZERS if name not in tested]
    if len(others) >= len(tested):
        return ", ".join(name for name in OPTIMIZERS if name in tested)
    return f"{EXCEPT}{', '.join(others)}" if others else ALL


def main() -> None:
    found = Collector()
    status = pytest.main(["--collect-only", "-qqq", str(ROOT / "tests")], plugins=[found])
    if status or found.has_skipped:
        raise SystemExit("Not written: some tests cannot be collected here.")
    blocks.write(PAGE, "support", matrix(found.shown))
    BY_STAGE.write_text(by_stage(found.shown))


if __name__ == "__main__":
    main()
