"""Compares the private names that ds_ext relies on with the installed versions of their packages.

    python -m tests.tools.contract [--write]

Prints a line for each name of ``ds_ext.contract`` that is new, missing, takes other arguments or
has another source than in the supported versions. ``--write`` records the names as installed,
and the installed versions as supported. PYTHONPATH may put another version of a package first.
"""

import hashlib
import importlib.metadata
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

from ds_ext import contract
from ds_ext.contract import numbers

PACKAGES = ("deepspeed", "torch", "transformers", "accelerate")


def names() -> list[str]:
    """The recorded names that say why, and the methods that patches and our engines replace."""
    # Imported here: this program also runs where they cannot be imported.
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from ds_ext.engine.own_engine import COMMUNICATING, OwnEngine
    from ds_ext.engine.patches import PATCHES

    found = {name for name, recorded in contract.records()["names"].items() if "why" in recorded}
    replaced = [(patch.owner, patch.name) for patch in PATCHES]
    for name in {*vars(OwnEngine), *COMMUNICATING}:
        base = DeepSpeedEngine if hasattr(DeepSpeedEngine, name) else PipelineEngine
        replaced += [(base, name)] if name[:2] != "__" and hasattr(base, name) else []
    return sorted(found | {f"{o.__module__}:{o.__qualname__}.{name}" for o, name in replaced})


def described(name: str) -> dict[str, str] | None:
    """What is recorded of a name as it is installed; None if it is missing.

    That is why ds_ext needs it, and the parameters and the hash of the source, if it has any.
    """
    try:
        value = contract.resolve(name)
    except (ImportError, AttributeError):
        return None
    known = contract.records()["names"].get(name, {})
    found = {"why": known["why"]} if "why" in known else {}
    parameters = contract.parameters(value)
    if parameters is None:
        return found
    return found | {"parameters": parameters, "source": hashed(inspect.getsource(value))}


def hashed(source: str) -> str:
    """A hash of source code without comments and whitespace, which no version of Python changes."""
    tokens = tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline)
    for comment in [token.string for token in tokens if token.type == tokenize.COMMENT]:
        source = source.replace(comment, "", 1)
    return hashlib.sha256(re.sub(r"\s", "", source).encode()).hexdigest()[:12]


def changes(recorded: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """A line for each name that differs."""
    for name in sorted({*recorded, *found}):
        old, new = recorded.get(name), found.get(name)
        if old is None or new is None:
            yield f"{name} is {'new' if old is None else 'missing'}"
        elif old.get("parameters") != new.get("parameters"):
            yield f"{name} took ({old.get('parameters')}) and takes ({new.get('parameters')})"
        elif old != new:
            yield f"{name} has another source"


def main() -> None:
    versions = {p: importlib.metadata.version(p).partition("+")[0] for p in PACKAGES}
    known = contract.records()
    listed = names() if "--write" in sys.argv else sorted(known["names"])
    found = {name: new for name in listed if (new := described(name)) is not None}
    for package, version in versions.items():
        print(f"{package}: {known['versions'].get(package)} is supported, {version} is installed")
    print(*changes(known["names"], found), sep="\n")
    if "--write" in sys.argv:
        if missing := [name for name in listed if name not in found]:
            sys.exit(f"missing, so nothing was recorded: {', '.join(missing)}")
        newest = {p: max(v, known["versions"].get(p, v), key=numbers) for p, v in versions.items()}
        said = {"versions": newest, "names": found}
        contract.RECORDS.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
