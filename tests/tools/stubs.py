"""ds_ext/__init__.pyi: the optimizers' classes, which are made at run time, for editors.

``make readme`` writes it. A class's docstring lists its hyper-parameters with the comments beside
their fields.
"""

import ast
import inspect
import re
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import ds_ext
from ds_ext.optimizer import OPTIMIZERS, RuleOptimizer

HEAD = '''"""Types of ds_ext for editors and type checkers. Written by `make readme`."""

from collections.abc import Iterable
from typing import Any, Literal
'''
LAZY = ("FuseCallback", "MetricsCallback")  # of ds_ext.hf, which imports transformers


def text() -> str:
    """The whole file."""
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
    comments = _comments(optimizer.hypers)
    arguments, documented = [], []
    for name, parameter in inspect.signature(optimizer.hypers).parameters.items():
        default = "" if parameter.default is parameter.empty else f" = {_quoted(parameter.default)}"
        arguments.append(f"        {name}: {_written(types[name])}{default},")
        if name in comments:
            documented.append(f"        {name}: {comments[name]}.")
    return "\n".join(
        [
            f"class {optimizer.__name__}(RuleOptimizer):",
            f'    """{inspect.cleandoc(optimizer.__doc__ or "").splitlines()[0]}',
            "",
            "    Args:",
            "        params: parameters, or groups of them.",
            *documented,
            '    """',
            "",
            "    def __init__(",
            "        self,",
            "        params: Iterable[Any],",
            "        *,",
            *arguments,
            "    ) -> None: ...",
            "",
        ]
    )


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _written(hint: Any) -> str:
    """A type as source code."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_written, get_args(hint)))
    if isinstance(hint, type) and not get_args(hint):
        return "None" if hint is NoneType else hint.__name__
    return str(hint).replace("typing.", "").replace("'", '"')


def _comments(hypers: type) -> dict[str, str]:
    """The comments beside the fields of a dataclass and its bases, by field."""
    found: dict[str, str] = {}
    for base in hypers.__mro__:
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made at run time, or written in C
            continue
        for name, comment in re.findall(r"(?m)^    (\w+): .*?  # (.+)$", source):
            found.setdefault(name, comment)
    return found
