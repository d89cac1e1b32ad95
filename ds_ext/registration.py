"""Registers ds_ext optimizers when a program imports DeepSpeed, without importing it first.

If ds_ext cannot use this version of DeepSpeed, it patches nothing, and only ``initialize`` raises,
for engines that would have an optimizer of ds_ext. A program of ``python -m ds_ext run`` loads this
file by itself. Therefore it imports the package, and with it torch, only after DeepSpeed.
"""

import functools
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


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


def _refuse(reason: Exception) -> None:
    """Makes ``deepspeed.initialize`` raise ``reason`` for ds_ext's optimizers, and only these."""
    from ds_ext.optimizer import RuleOptimizer

    deepspeed: Any = sys.modules["deepspeed"]
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        own = getattr(given.get("args"), "deepspeed_config", None)
        config = given.get("config") or given.get("config_params") or own
        if isinstance(given.get("optimizer"), RuleOptimizer) or _names_ours(config):
            raise reason
        return original(*args, **kwargs)

    deepspeed.initialize = initialize


def _names_ours(config: Any) -> bool:
    """Whether a config has the section "ds_ext", or an optimizer that only ds_ext has."""
    from ds_ext.optimizer import OPTIMIZERS
    from ds_ext.rules.base import key_of

    if isinstance(config, (str, Path)) and os.path.isfile(config):
        try:
            config = json.loads(Path(config).read_text())
        except ValueError:  # DeepSpeed reports it, or reads Hjson
            return False
    section = config.get("optimizer") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(section or {}, dict):
        return False
    name = str((section or {}).get("type", "")).lower()
    theirs = sys.modules["deepspeed.runtime.config"].DEEPSPEED_OPTIMIZERS
    ours = name.startswith("ds_ext.") or (key_of(name) in OPTIMIZERS and name not in theirs)
    return ours or "ds_ext" in config


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
