"""Functions whose calls a test notes, and which do what they did before."""

from collections.abc import Callable
from typing import Any

import pytest


def noted(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]
) -> list[Any]:
    """What ``note`` returns of the arguments of each call of a function, from now on."""
    original, found = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        found.append(note(*args, **kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return found
