"""Versions of other packages, and the private names of theirs that ds_ext relies on.

Importing this module checks the version of torch.

``contract.json`` holds the names that exist in the supported versions, with the parameters of
functions and hashes of their source. "MODULE:CLASS.NAME" is a method or class attribute, and
"MODULE:CLASS@NAME" an attribute that the module's source assigns or reads. Each name says "why"
ds_ext needs it, except for patched methods: their patches say so. With these versions, or older
ones, nothing is checked, because tests run with them. With a newer one, ``check`` finds names that
are missing or take other arguments. ``make contract`` compares all names with the installed
versions. To add a name, write its "why" into ``contract.json`` and run
``make contract ARGS=--write``.
"""

import functools
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ds_ext import logs

LOWEST = {"torch": (2, 6), "deepspeed": (0, 19, 8)}
SWITCH = "DS_EXT_ANY_DEEPSPEED"  # set to 1 to go on with a version that fails the check
RECORDS = Path(__file__).with_suffix(".json")


def numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without its build tag: "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def written(version: tuple[int, ...]) -> str:
    """Returns a version as text: (2, 6) -> "2.6"."""
    return ".".join(map(str, version))


def check_lowest(package: str, version: str) -> None:
    """Checks the version of torch or DeepSpeed.

    Raises:
        ImportError: the version is too old. The message is one sentence.
    """
    lowest = written(LOWEST[package])
    if numbers(version) < LOWEST[package]:
        instead = ", or train without DeepSpeed: call ds_ext.fuse_into_backward"
        raise ImportError(
            f"ds_ext works with {package} {lowest} and newer, and {version} is installed: "
            f'pip install "{package}>={lowest}"{instead * (package == "deepspeed")}.'
        )


@functools.cache
def records() -> dict[str, Any]:
    """Returns the supported versions by package, and what is recorded of each name."""
    return json.loads(RECORDS.read_text())  # type: ignore[no-any-return]


@functools.cache
def check(*packages: str) -> None:
    """Checks packages that are newer than the supported versions, and warns of them once.

    Raises:
        RuntimeError: names are missing or take other arguments, and ``DS_EXT_ANY_DEEPSPEED`` is
            not 1. The message names them, and the versions that work.
    """
    supported = records()["versions"]
    installed = {package: _version(package) for package in packages}
    newer = {p: v for p, v in installed.items() if numbers(v) > numbers(supported[p])}
    problems = [problem for package in newer for problem in broken(package)]
    have = ", ".join(f"{package} {version}" for package, version in newer.items())
    works = " ".join(f'"{package}<={supported[package]}"' for package in newer)
    if problems and os.environ.get(SWITCH) != "1":
        raise RuntimeError(
            f"ds_ext does not know {have}: {'; '.join(problems)}: pip install {works}, or set "
            f"{SWITCH}=1 to try this version all the same."
        )
    if newer and os.environ.get("RANK", "0") == "0":
        logs.show_by_default()
        logs.logger.warning(f"ds_ext was not tested with {have}; it was tested with {works}")


def _version(package: str) -> str:
    """The version of an installed package, or of a checkout on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(pkgutil.resolve_name(f"{package}:__version__"))


def broken(package: str) -> list[str]:
    """Returns the recorded names of a package that are missing or take other arguments.

    A new argument that has a default is no difference.
    """
    told = []
    for name, recorded in records()["names"].items():
        if name.partition(":")[0].partition(".")[0] == package:
            try:
                new, old = parameters(resolve(name)), recorded.get("parameters")
            except (ImportError, AttributeError):
                told.append(f"{name} is missing")
                continue
            if old is not None and not accepts((new or "").split(", "), old.split(", ")):
                told.append(f"{name} takes ({new})")
    return told


def resolve(name: str) -> Any:
    """Returns what a name stands for; None for "CLASS@NAME".

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such name.
    """
    name, _, attribute = name.partition("@")
    value = pkgutil.resolve_name(name)
    if attribute:
        source = Path(str(sys.modules[value.__module__].__file__)).read_text()
        if not re.search(rf"\b{attribute}\b", source):
            raise AttributeError(attribute)
        return None
    return inspect.unwrap(value) if callable(value) else value


def parameters(value: Any) -> str | None:
    """Returns the parameters of a function or class, as in "self, given=, **more"; else None."""
    if not inspect.isfunction(value) and not (inspect.isclass(value) and "__init__" in vars(value)):
        return None
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    found = inspect.signature(value).parameters.values()
    return ", ".join(
        stars.get(p.kind, "") + p.name + "=" * (p.default is not p.empty) for p in found
    )


def accepts(new: list[str], old: list[str]) -> bool:
    """Returns whether a function still takes its old parameters, and needs no others."""
    return new[: len(old)] == old and all(p.endswith("=") or p[0] == "*" for p in new[len(old) :])


check_lowest("torch", torch.__version__)
