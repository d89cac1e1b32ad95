"""The walls between the package's rooms, read from the source: imports run downwards only."""

import ast
import functools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.common import apart
from tests.common.choose import params

PACKAGE = next(up for up in Path(__file__).parents if (up / "ds_ext").is_dir()) / "ds_ext"

# The other packages that each package may import. All may import the foundation (errors, logs,
# hyperparams, rates, …), which imports nothing else of ds_ext.
WALLS = {
    "ops": "",
    "rules": "ops",
    "distributed": "ops",
    "optimizer": "ops rules distributed",
    "backward": "ops distributed optimizer",
    "forward": "",
    "checkpoint": "ops optimizer",
    "config": "ops rules optimizer backward",
    "engine": "ops rules distributed optimizer forward backward checkpoint config",
    "commands": "__init__ registration rules optimizer backward config planner engine",
    "planner": "__init__ ops distributed optimizer forward backward config",
    "testing": "ops rules distributed optimizer",
    "axolotl": "",
    "hf": "distributed backward optimizer",
    "__init__": "ops distributed rules optimizer forward backward checkpoint registration hf",
    "registration": "optimizer config engine",
}
FOUNDATION = {"contract", "errors", "logs", "hyperparams", "rates", "settings"}

# The only rooms that may import a package; torch's own distributed package counts as one.
ONLY = {
    "deepspeed": "engine/",
    "triton": "ops/executors/triton/",
    "bitsandbytes": "ops/quantize.py",
    "torch.distributed": "distributed/ engine/",
    "lomo_optim": "",  # the authors' code is for tests
    "came_pytorch": "",
    "galore_torch": "",
    "apollo_torch": "",
}
WITHOUT_TORCH = {"ops/shard.py", "hyperparams.py", "errors.py", "checkpoint/folder.py"}
WITHOUT_TORCH |= {"checkpoint/manifests.py"}
IMPORTS_OF_USERS = {"commands/cli.py", "registration.py"}  # the option --import
# What DeepSpeed sets on parameters and modules: read and written in the package engine only.
DEEPSPEED_ATTRIBUTES = ("ds_", "_ds_", "allreduce", "group_name", "tensor_model_parallel")


# The modules with a registered rule, which only ``all_rules`` imports, and ``all_rules`` itself.
RULES = {f.stem for f in (PACKAGE / "rules").glob("*.py") if "\n@register(" in f.read_text()}
RULES |= {"all_rules"}


def package_of(path: str) -> str:
    """The package of a file (relative to ds_ext/)."""
    first = Path(path).parts[0].removesuffix(".py")
    if first in FOUNDATION:
        return "foundation"
    if first in WALLS:
        return first
    return "commands" if first == "__main__" else "unknown"


@functools.cache
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
        elif isinstance(node, ast.Name) and node.id == "__import__":
            found.add("a computed name")
        elif isinstance(node, ast.Attribute) and node.attr == "import_module":
            found.add("a computed name")
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            if ast.unparse(node.value) == "torch":
                found.add("torch.distributed")
    return found


def deepspeed_attributes(source: str) -> set[str]:
    """Attributes in a source that only DeepSpeed sets."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("attr"):
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
        found |= {n for n in names if str(n).startswith(DEEPSPEED_ATTRIBUTES[:2])}
        found |= {n for n in names if n in DEEPSPEED_ATTRIBUTES}
    return found


def violations(source: str, path: str) -> list[str]:
    """What the source of ``path`` (relative to ds_ext/) breaks of the walls, in words."""
    package = package_of(path)
    found = []
    for name in imports(source, "ds_ext." + path.removesuffix(".py").replace("/", ".")):
        if name == "a computed name" and path not in IMPORTS_OF_USERS:
            found.append(f"{package} imports by a computed name")
        if name.split(".")[0] == "torch" and path in WITHOUT_TORCH:
            found.append(f"{path} imports torch")
        for module, allowed in ONLY.items():
            inside = any(path.startswith(where) for where in allowed.split())
            if f"{name}.".startswith(f"{module}.") and not inside:
                found.append(f"{path} imports {module}")
        if name.split(".")[0] == "ds_ext":
            found += _own_import(package, name)
        if package == "rules" and path != "rules/all_rules.py":
            found += [f"{path} imports the rule {x}" for x in RULES & {*name.split(".")[2:3]}]
    if package != "engine":
        found += [f"{path} reads {name}" for name in deepspeed_attributes(source)]
    return sorted(set(found))


def _own_import(package: str, name: str) -> list[str]:
    """What an import of the package's own breaks."""
    first = (name.split(".") + [""])[1]
    files = (PACKAGE / f"{first}.py", PACKAGE / first / "__init__.py")
    is_module = bool(first) and any(file.is_file() for file in files)
    target = package_of(f"{first}.py") if is_module else "__init__"  # a name of the package's own
    allowed = {package, "foundation", *WALLS.get(package, "").split()}
    return [] if target in allowed else [f"{package} imports {target}"]


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_walls_stand(path):
    assert violations((PACKAGE / path).read_text(), path) == []


def modules() -> dict[str, set[str]]:
    """The modules of the package by name, with the modules that each imports anywhere in it."""
    files = {"ds_ext." + f.removesuffix(".py").replace("/", "."): f for f in FILES}
    names = {name.removesuffix(".__init__") for name in files}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        own = name.removesuffix(".__init__")
        given = imports((PACKAGE / file).read_text(), name)
        targets = {x if x in names else x.rpartition(".")[0] for x in given}
        found[own] = (targets & names) - {own, "ds_ext"}
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """What remains of a graph after modules that import none of the rest are taken away, and so on.

    Only modules in a circle, or between two circles, remain.
    """
    left = dict(graph)
    while done := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in done:
            del left[name]
    while unused := [n for n in left if not any(n in targets for targets in left.values())]:
        for name in unused:
            del left[name]
    return sorted(left)


def test_modules_import_each_other_in_no_circle():
    graph = modules()
    assert len(graph) > 150 and graph["ds_ext.ops.functions"] > {"ds_ext.ops.batch"}
    assert circles(graph) == []


def reached(graph: dict[str, set[str]], name: str) -> set[str]:
    """The modules that importing a module imports, and the packages that they are in."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in found or one == "ds_ext":
            continue
        found.add(one)
        waiting += [*graph.get(one, ()), one.rpartition(".")[0]]
    return found


def test_a_rule_needs_few_files():
    found = reached(modules(), "ds_ext.rules.adalomo")
    assert {"ds_ext.ops", "ds_ext.ops.functions", "ds_ext.rules.factored"} < found
    assert len(found) <= 30 and not any("triton" in name or "table" in name for name in found)


def test_a_circle_is_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(graph) == ["b", "c"]


def test_every_package_has_an_import_contract():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(WALLS) - {"__init__", "registration", "axolotl", "hf"}


PLANTED = [  # one of each kind
    ("rules/new.py", "from torch import distributed", "rules/new.py imports torch.distributed"),
    ("ops/runs.py", "def f():\n    import triton.language as tl", "ops/runs.py imports triton"),
    ("rules/new.py", "from ds_ext.rules.adamw import AdamW", "rules/new.py imports the rule adamw"),
    ("ops/shard.py", "from torch import Tensor", "ops/shard.py imports torch"),
    ("backward/buckets.py", "from ..engine import adapter", "backward imports engine"),
    ("hyperparams.py", "from ds_ext.ops.shard import Shard", "foundation imports ops"),
    ("backward/new.py", "from ds_ext import AdaLomo", "backward imports __init__"),
    ("ops/new.py", "import importlib\nimportlib.import_module(n)", "ops imports by a computed"),
    ("optimizer/new.py", "x = getattr(p, 'ds_tensor', None)", "optimizer/new.py reads ds_ten"),
]


@pytest.mark.parametrize("path, source, complaint", PLANTED)
def test_a_planted_violation_is_seen(path, source, complaint):
    found = violations(source, path)
    assert len(found) == 1 and found[0].startswith(complaint)


@pytest.mark.slow  # make check runs it too
def test_plain_pytorch_does_not_import_deepspeed():
    code = "import sys, ds_ext; print(*{'deepspeed', 'transformers', 'triton'} & set(sys.modules))"
    assert apart.python("-c", code).stdout.strip() == ""


@pytest.mark.slow  # make check runs it too
def test_what_plain_pytorch_imports_is_required_at_installation():
    code = "import sys, ds_ext; print(*(getattr(m, '__file__', 0) for m in sys.modules.values()))"
    own = [
        node
        for path in apart.python("-c", code).stdout.split()
        if Path(path).is_relative_to(PACKAGE)
        for node in ast.parse(Path(path).read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    imported = {alias.name for n in own if isinstance(n, ast.Import) for alias in n.names}
    imported |= {node.module for node in own if isinstance(node, ast.ImportFrom)}
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    (line,) = re.findall(r"(?m)^dependencies = (.+)", project)
    required = set(re.findall(r'"(\w+)', line))
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert packages == required | {"ds_ext"}


ORDERS = ["import ds_ext, deepspeed", "import deepspeed, ds_ext"]


@pytest.mark.slow  # make check runs it too
@pytest.mark.parametrize("order", params(ORDERS, ORDERS[1:]))
def test_deepspeed_knows_the_optimizers_in_either_order_of_imports(order):
    code = f"{order}\nmethod = deepspeed.DeepSpeedEngine.__init__.__wrapped__\n"
    code += "print(hasattr(method, '__wrapped__'))"  # patched once
    assert apart.python("-c", code).stdout.splitlines()[-1] == "False"


PACKAGES = ("deepspeed", "torch", "accelerate", "transformers")
# torch's registries, to which importing more of torch and of custom operations adds.
REGISTRIES = {
    *("torch._library.custom_ops.OPDEF_TO_LIB", "torch.jit._builtins._builtin_table"),
    *("torch.library._impls", "torch.library._defs"),
}


def names() -> dict[str, object]:
    """The value of each name in the loaded modules of the packages, and in their classes."""
    found = {}
    for path, module in sorted(sys.modules.items()):
        if path.partition(".")[0] in PACKAGES and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                found[f"{path}.{name}"] = _value(value)
                if isinstance(value, type) and value.__module__ == path:
                    of_class = vars(value).items()
                    found |= {f"{path}.{name}.{own}": _value(each) for own, each in of_class}
    return found


def _value(value: object) -> object:
    """What identifies a value: of a container its elements, which change in place."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else id(key): id(x) for key, x in value.items()}
    return [*map(id, value)] if isinstance(value, (list, tuple, set, frozenset)) else id(value)


def changed() -> list[str]:
    """Names that the import changes or adds. Modules that it imports are none of them."""
    import accelerate  # noqa: F401
    import deepspeed  # noqa: F401

    # Modules that ds_ext imports, and that set names of their packages.
    import torch._dynamo  # noqa: F401
    import transformers  # noqa: F401
    from deepspeed.runtime.sequence_parallel import ulysses_sp  # noqa: F401
    from torch.distributed import fsdp, tensor  # noqa: F401

    before, kept = names(), list(map(vars, [*sys.modules.values()]))  # no id is used again
    import ds_ext  # noqa: F401

    after = names()
    assert kept
    parents = {name.rpartition(".")[0] for name in before}
    return sorted(
        name
        for name, value in after.items()
        if name not in REGISTRIES
        and value != before.get(name)
        and name.rpartition(".")[0] in parents
        and not (name not in before and name in sys.modules)
    )


@pytest.mark.slow
def test_only_patches_change_names():
    """Those of engine/patches.py, each of which says why; contract.json records them."""
    from ds_ext.engine.patches import PATCHES

    code = "from tests.unit import test_walls; print(*test_walls.changed(), sep=chr(10))"
    owners = [(f"{patch.owner.__module__}.{patch.owner.__qualname__}", patch) for patch in PATCHES]
    expected = sorted({f"{owner}.{patch.name}" for owner, patch in owners})
    assert apart.python("-c", code).stdout.splitlines() == expected
