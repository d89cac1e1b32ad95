"""Which cases of a table `make test` runs; the others are marked slow, for `make test-all`."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest


def spread(rules: Iterable[Any], others: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Cases in which each rule comes up, and each of ``others``, but not each with each.

    As many as the longer of the two: a further rule adds one case, or none.
    """
    rules, others = list(rules), list(others)
    number = max(len(rules), len(others))
    return [(rules[i % len(rules)], *others[i % len(others)]) for i in range(number)]


def params(cases: Iterable[Any], quick: Container[Any] | Callable[[Any], bool]) -> list[Any]:
    """The parameters of a test; those that are not ``quick`` are marked slow.

    Args:
        cases: A value each, or a tuple of values where the test has several parameters.
        quick: The cases that `make test` runs, or a function that tells whether it does.

    Raises:
        ValueError: If ``quick`` is a collection that names what is not among the cases.
    """
    cases = list(cases)
    if isinstance(quick, Iterable) and (unknown := [case for case in quick if case not in cases]):
        raise ValueError(f"{unknown} are not among the cases")
    is_quick = quick if callable(quick) else quick.__contains__
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if is_quick(case) else [pytest.mark.slow],
        )
        for case in cases
    ]
