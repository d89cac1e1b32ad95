"""Code that documents quote: made from the package, so that it says what the package does.

A document marks the block that it quotes a function, method or class in:

    <!-- code: ds_ext/rules/adalomo.py AdaLomo.step -->
    ```python
    ...
    ```

and the table of optimizers lies between ``<!-- optimizers: ... -->`` and
``<!-- end of optimizers -->``; likewise the keys of a config (reference.py), and the
tables of learning rates (rates.py). The learning rates that examples set are those of
ds_ext/rates.json.
``make readme`` (``python -m tests.tools.snippets``) writes all of these anew in README.md and
docs/, and the files in configs/; tests fail while they are not what the source says.
"""

import ast
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ds_ext.commands import config
from ds_ext.ops import expressions, functions, moments
from ds_ext.rules import REGISTRY
from tests.tools import rates, reference, stubs

ROOT = Path(__file__).parents[2]
CONTRIBUTORS = (  # pages that README.md lists for them
    *("architecture", "algorithms", "adding-an-optimizer", "tests", "tests-by-feature"),
    *("performance-method", "gpu"),
)
_MARKED = re.compile(
    r"(?m)^<!-- code: (?P<path>\S+) (?P<name>\S+) -->\n```python\n(?P<code>.*?)^```$", re.S
)
_MADE = re.compile(
    r"(?ms)^(<!-- (?P<what>optimizers|operations|keys|rates|results|scratch): [^\n]* -->)\n"
    r".*?^(<!-- end of (?P=what) -->)$"
)
_BLOCK = re.compile(r"(?m)^```python\n(.*?)^```$", re.S)


def documents() -> list[Path]:
    """All documents that may quote code."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def user_words() -> int:
    """The words on the pages for users, as ``wc -w`` counts them."""
    pages = [path for path in documents() if path.stem not in CONTRIBUTORS]
    return sum(len(page.read_text().split()) for page in pages)


def source_of(path: str, name: str) -> str:
    """The source of a function, method or class, such as ``AdaLomo.step``, without its margin.

    Raises KeyError if the file has none of this name.
    """
    source = (ROOT / path).read_text()
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        inner = {n.name: n for n in ast.iter_child_nodes(node) if isinstance(n, _DEFINITIONS)}
        node = inner[part]
    assert isinstance(node, _DEFINITIONS) and node.end_lineno is not None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines)) + "\n"


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def renewed(text: str) -> str:
    """A document whose marked blocks say what the source says."""

    def block(found: re.Match[str]) -> str:
        path, name = found["path"], found["name"]
        return f"<!-- code: {path} {name} -->\n```python\n{source_of(path, name)}```"

    text = _MARKED.sub(block, text)
    made = {"optimizers": optimizers, "keys": reference.keys, "operations": operations}
    made |= {"rates": rates.table, "results": rates.results, "scratch": rates.from_scratch}
    text = rates.renewed(text)
    return _MADE.sub(lambda found: f"{found[1]}\n{made[found['what']]()}\n{found[3]}", text)


def optimizers() -> str:
    """The table of optimizers, a row for each registered rule."""
    head = ["| `type` | | state, bytes per parameter and rank | rounds | paper |"]
    head.append("|---|---|---|---|---|")
    rows = []
    for entry in REGISTRY.values():
        what = entry.summary.partition(" (arXiv")[0].rstrip(".").replace("|", "\\|")
        if entry.others is not None:
            what += f"; matrices of linear layers, {entry.others} for the rest"
        paper = f"[{entry.paper}](https://arxiv.org/abs/{entry.paper})"
        rows.append(
            f"| `{entry.rule.__name__}` | {what} | {entry.state} | {entry.rounds} | {paper} |"
        )
    return "\n".join(head + rows)


def operations() -> str:
    """The table of the functions and expressions of ``ops`` whose docstrings have an example."""
    rows = ["| | example |", "|---|---|"]
    for name, (what, example) in examples().items():
        what = re.sub("``(.+?)``", r"`\1`", what).replace("|", "\\|")
        rows.append(f"| **{name}** {what} | `{example}` |")
    return "\n".join(rows)


def examples() -> dict[str, tuple[str, str]]:
    """By name in ``ops``: the first sentence of the docstring, and the line of its example."""
    found = {}
    for module in (functions, expressions, moments):
        for name, x in vars(module).items():
            text = inspect.getdoc(x) or ""
            if getattr(x, "__module__", "") == module.__name__ and "Example: ``" in text:
                first = text.partition("\n\n")[0].replace("\n", " ")
                found[name] = first, re.findall(r"Example: ``(.+?)``", text, re.S)[0]
    return found


@functools.cache
def _definitions() -> set[str]:
    """The lines of the package that begin a definition."""
    return {
        line.strip()
        for path in (ROOT / "ds_ext").rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s*(def|class) ", line)
    }


def unmarked(text: str) -> Iterator[str]:
    """Definitions in blocks without a mark that are headed like one of the package's.

    Those inside a class of the block's own are not meant.
    """
    own = _definitions()
    for code in _BLOCK.findall(_MARKED.sub("", text)):
        yield from (line for line in code.splitlines() if line in own)


def generated() -> Iterator[tuple[Path, str]]:
    """The files that are generated whole, and their texts: types and configs.

    Configs are what ``python -m ds_ext config`` prints: those of HF Trainer have "auto"; those in
    ``plain`` have numbers, for ``deepspeed.initialize``.
    """
    yield ROOT / "ds_ext/__init__.pyi", stubs.text()
    for name in REGISTRY:
        for folder, numbers in (("configs", False), ("configs/plain", True)):
            text = json.dumps(config.make(name, 3, numbers), indent=2) + "\n"
            yield ROOT / folder / f"{name}_zero3.json", text


if __name__ == "__main__":
    for document in documents():
        document.write_text(renewed(document.read_text()))
    for file, text in generated():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
