"""Imported by Python when it starts a program of ``python -m ds_ext run``, or a child of one.

It makes ds_ext known to DeepSpeed when DeepSpeed is imported, and imports neither. It takes its
own folder off ``sys.path``, and runs the ``sitecustomize`` that it hides, if there is one.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def _run(spec: ModuleSpec | None) -> ModuleType:
    """Makes the module of a spec that was found, and runs it."""
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _register() -> None:
    """By the module's file: importing the package would import torch into every program."""
    path = Path(__file__).resolve().parents[2] / "registration.py"
    spec = importlib.util.spec_from_file_location("_ds_ext_registration", path)
    _run(spec).register()


_here = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != _here]
_register()
_hidden = PathFinder.find_spec("sitecustomize")
if _hidden is not None:
    _run(_hidden)
