"""ds_ext/__init__.pyi, by ``make readme``: the classes that are made at run time, for editors."""

import ast
import inspect
import textwrap
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import ds_ext
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer
from ds_ext.rules import named

HEAD = '''"""Types of ds_ext for editors and type checkers. Written by `make readme`."""

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn
'''
LAZY = ("FuseCallback", "MetricsCallback")  # of ds_ext.hf, which imports transformers


def text() -> str:
    tree = ast.parse(inspect.getsource(ds_ext))
    own = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imports = [(node.module, name.name) for node in own for name in node.names]
    imports += [("ds_ext.hf", name) for name in LAZY]
    lines = [f"from {module} import {name} as {name}" for module, name in sorted(imports)]
    classes = [_class(optimizer) for optimizer in OPTIMIZERS.values()]
    return "\n".join([HEAD, *lines, "", "__version__: str", "", *classes])


def _class(optimizer: type[RuleOptimizer]) -> str:
    """An optimizer with its written signature."""
    types = get_type_hints(optimizer.hypers)
    arguments, of_model = [], ["        param_groups: list[dict[str, Any]] = ...,"]
    if named(optimizer.rule.__name__).roles:
        of_model += ["        target_modules: str | list[str] = ...,"]
        of_model += ["        others: dict[str, Any] = ...,"]
    for name, parameter in inspect.signature(optimizer.hypers).parameters.items():
        default = "" if parameter.default is parameter.empty else f" = {_quoted(parameter.default)}"
        arguments.append(f"        {name}: {_written(types[name])}{default},")
    return "\n".join(
        [
            f"class {optimizer.__name__}(RuleOptimizer):",
            textwrap.indent(f'"""{optimizer.__doc__}\n"""', "    "),
            "",
            "    def __init__(",
            "        self,",
            "        params: Iterable[Any],",
            "        *,",
            *arguments,
            "    ) -> None: ...",
            "    @classmethod",
            "    def for_model(",
            "        cls,",
            "        module: nn.Module,",
            "        *,",
            *arguments,
            *of_model,
            f"    ) -> {optimizer.__name__}: ...",
            "",
        ]
    )


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _written(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_written, get_args(hint)))
    if isinstance(hint, type) and not get_args(hint):
        return "None" if hint is NoneType else hint.__name__
    return str(hint).replace("typing.", "").replace("'", '"')
