"""Registers ds_ext optimizers when a program imports DeepSpeed, without importing it first."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register() -> None:
    """Registers ds_ext optimizers with DeepSpeed: now, or when DeepSpeed is imported."""
    if "deepspeed" in sys.modules:
        _patch()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _patch() -> None:
    from ds_ext.engine import patches

    patches.register()


class _WhenImported(MetaPathFinder):
    """Finds DeepSpeed through the other finders, and patches it after its import."""

    def __init__(self) -> None:
        self.is_asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "deepspeed" or self.is_asking:
            return None
        self.is_asking = True  # find_spec asks all finders, including this one
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _patch()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
