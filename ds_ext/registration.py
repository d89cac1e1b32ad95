"""Registers ds_ext optimizers when a program imports DeepSpeed, without importing it first.

If ds_ext cannot use this version of DeepSpeed, it patches nothing, and only ``initialize`` raises,
for engines that would have an optimizer of ds_ext. A program of ``python -m ds_ext run`` loads this
file by itself. Therefore it imports the package, and with it torch, only after DeepSpeed.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

IMPORTS = "DS_EXT_IMPORT"  # modules of the user, set by ``run --import``


def register() -> None:
    """Registers ds_ext optimizers with DeepSpeed: now, or when DeepSpeed is imported."""
    if "deepspeed" in sys.modules:
        _patch()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _patch() -> None:
    from ds_ext import contract

    try:
        contract.check("deepspeed", "torch")
        from ds_ext.engine import patches

        patches.register()
    except (ImportError, AttributeError, RuntimeError) as error:
        _refuse(error)
    for name in os.environ.get(IMPORTS, "").split():
        importlib.import_module(name)


def _refuse(reason: Exception) -> None:
    """Makes ``deepspeed.initialize`` raise ``reason`` for ds_ext's optimizers, and only these."""
    from ds_ext.config.optimizer_names import concerns_us
    from ds_ext.optimizer import RuleOptimizer

    deepspeed: Any = sys.modules["deepspeed"]
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        passed = inspect.signature(original).bind(*args, **kwargs).arguments
        own = getattr(passed.get("args"), "deepspeed_config", None)
        config = passed.get("config") or passed.get("config_params") or own
        if isinstance(passed.get("optimizer"), RuleOptimizer) or concerns_us(config):
            raise reason
        return original(*args, **kwargs)

    deepspeed.initialize = initialize


class _WhenImported(MetaPathFinder):
    """Finds DeepSpeed through the other finders, and patches it after its import."""

    is_asking = False

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
