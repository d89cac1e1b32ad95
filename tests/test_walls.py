"""The import walls of DESIGN.md, read from the source: imports run downwards only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ds_ext"

# What each part stands on. It may import these and whatever they stand on, and nothing else of
# the package; a part that is not named here yet has to be given its place.
STANDS_ON = {
    "__main__": ["register", "memory", "offload"],
    "__init__": ["register", "fuse"],
    "register": ["resume", "offload"],
    "resume": ["zero", "ranks", "grouping"],
    "zero": ["partitions", "gradients", "checkpoint", "settings"],
    "partitions": ["parallel", "moe", "order", "layout"],
    "moe": ["domains"],
    "parallel": ["domains"],
    "order": ["ranks"],
    "fuse": ["gradients", "ranks"],
    "ranks": ["domains", "folder"],
    "folder": ["swap"],
    "swap": [],
    "grouping": ["stacks"],
    "checkpoint": ["optimizer", "folder"],
    "gradients": ["optimizer", "buckets", "rehearsal", "settings"],
    "rehearsal": [],
    "buckets": ["uses", "layout", "ops", "beside"],
    "beside": [],
    "uses": [],
    "layout": ["domains"],
    "domains": ["shard", "lost"],
    "lost": [],
    "memory": ["optimizer"],
    "optimizer": ["rounds", "rules", "meter", "stacks", "home"],
    "offload": ["state", "precision"],
    "home": ["state"],
    "stacks": ["state"],
    "meter": ["ops", "precision"],
    "rounds": ["launches"],
    "rules": ["moment", "hyper", "lowrank", "quantize"],
    "lowrank": ["state"],
    "quantize": ["state"],
    "moment": ["state"],
    "state": ["ops"],
    "precision": ["scratch", "hyper", "launches"],
    "ops": ["scratch", "launches"],
    "launches": ["shard", "kernels"],
    "scratch": ["shard"],
    "kernels": [],
    "shard": [],
    "hyper": [],
    "settings": ["hyper"],
}

# The only parts that may import a package. Torch's own distributed package counts as one.
ONLY = {
    "deepspeed": {"zero", "partitions", "parallel", "moe", "register", "resume"},
    "triton": {"kernels"},
    "bitsandbytes": {"quantize"},
    "torch.distributed": {"domains", "layout", "lost", "moe", "partitions", "ranks", "zero"},
    "lomo_optim": set(),  # the authors' code is for tests
    "came_pytorch": set(),
    "galore_torch": set(),
}
WITHOUT_TORCH = {"shard", "hyper", "folder", "swap"}


def below(part: str) -> set[str]:
    """All that a part stands on."""
    found: set[str] = set()
    for lower in STANDS_ON[part]:
        found |= {lower} | below(lower)
    return found


def imports(source: str, module: str) -> set[str]:
    """Full names of what a module imports, wherever in it, and torch.distributed used by name.

    ``from a import b`` counts as a.b.
    """
    package = module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.add("torch.distributed")
        elif isinstance(node, ast.Name) and node.id in ("__import__", "importlib"):
            found.add("importlib")
    return found


def violations(source: str, path: str) -> list[str]:
    """What the source of ``path`` (relative to ds_ext/) breaks of the walls, in words."""
    part = Path(path).parts[0].removesuffix(".py")
    if part not in STANDS_ON:
        return [f"{part} has no place in STANDS_ON"]
    module = "ds_ext." + path.removesuffix(".py").replace("/", ".")
    found = []
    for name in imports(source, module):
        if name == "importlib":
            found.append(f"{part} imports by a computed name")
        if name.split(".")[0] == "torch" and part in WITHOUT_TORCH:
            found.append(f"{part} imports torch")
        for package, allowed in ONLY.items():
            if f"{name}.".startswith(f"{package}.") and part not in allowed:
                found.append(f"{part} imports {package}")
        if name.split(".")[0] == "ds_ext":
            target = (name.split(".") + [""])[1]
            target = target if target in STANDS_ON else "__init__"  # a name of the package's own
            if target != part and target not in below(part):
                found.append(f"{part} imports {target}")
    return sorted(set(found))


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_walls_stand(path):
    assert violations((PACKAGE / path).read_text(), path) == []


def test_the_files_are_found():
    expected = {"shard.py", "ops.py", "moment.py", "rounds.py", "optimizer.py", "zero.py"}
    assert expected | {"rules/came.py", "rules/__init__.py"} <= set(FILES)


PLANTED = [
    ("rules/new.py", "import torch.distributed as dist", "rules imports torch.distributed"),
    ("rules/new.py", "from torch import distributed", "rules imports torch.distributed"),
    ("rules/new.py", "from torch.distributed import nn", "rules imports torch.distributed"),
    ("moment.py", "import torch\ntorch.distributed.barrier()", "moment imports torch.distributed"),
    ("ops.py", "def f():\n    import triton.language as tl", "ops imports triton"),
    ("rules/new.py", "import triton", "rules imports triton"),
    ("rules/new.py", "from deepspeed import comm", "rules imports deepspeed"),
    ("optimizer.py", "import deepspeed", "optimizer imports deepspeed"),
    ("gradients.py", "import deepspeed.comm", "gradients imports deepspeed"),
    ("shard.py", "import torch", "shard imports torch"),
    ("shard.py", "from torch import Tensor", "shard imports torch"),
    ("gradients.py", "from ds_ext.zero import register", "gradients imports zero"),
    ("gradients.py", "from ds_ext import ops, zero", "gradients imports zero"),
    ("gradients.py", "from . import zero", "gradients imports zero"),
    ("optimizer.py", "from .gradients import FusedBackward", "optimizer imports gradients"),
    ("rules/new.py", "from ..optimizer import Update", "rules imports optimizer"),
    ("rules/new.py", "from ds_ext import rounds", "rules imports rounds"),
    ("rounds.py", "from ds_ext.rules import LOMO", "rounds imports rules"),
    ("ops.py", "from ds_ext import moment", "ops imports moment"),
    ("moment.py", "import ds_ext.rules.came", "moment imports rules"),
    ("hyper.py", "from ds_ext.shard import Shard", "hyper imports shard"),
    ("settings.py", "from ds_ext import ops", "settings imports ops"),
    ("checkpoint.py", "from ds_ext import gradients", "checkpoint imports gradients"),
    ("gradients.py", "import ds_ext", "gradients imports __init__"),
    ("gradients.py", "from ds_ext import AdaLomo", "gradients imports __init__"),
    ("ops.py", "import importlib\nimportlib.import_module(name)", "ops imports by a computed name"),
    ("ops.py", "t = __import__('triton')", "ops imports by a computed name"),
    ("rules/new.py", "import lomo_optim", "rules imports lomo_optim"),
    ("new.py", "", "new has no place in STANDS_ON"),
]


@pytest.mark.parametrize("path, source, complaint", PLANTED)
def test_a_planted_violation_is_seen(path, source, complaint):
    assert violations(source, path) == [complaint]


ALLOWED = [
    ("zero.py", "import deepspeed\nimport torch\ntorch.distributed.get_rank()"),
    ("zero.py", "from ds_ext.shard import Shard\nfrom . import gradients"),
    ("rules/new.py", "from ds_ext import moment, ops\nfrom ds_ext.hyper import Positive"),
    ("rules/__init__.py", "from ds_ext.rules.came import CAME"),
    ("kernels.py", "import triton\nimport triton.language as tl"),
    ("optimizer.py", "from ds_ext.rules import CAME\nimport torch.distributions"),
]


@pytest.mark.parametrize("path, source", ALLOWED)
def test_what_is_allowed_passes(path, source):
    assert violations(source, path) == []


def test_nothing_stands_on_itself():
    assert all(part not in below(part) for part in STANDS_ON)
    assert {lower for part in STANDS_ON for lower in below(part)} <= set(STANDS_ON)
    assert STANDS_ON["hyper"] == STANDS_ON["shard"] == []
