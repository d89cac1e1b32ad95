"""Which cases of a table `make test` runs; the others are marked slow, for `make test-all`."""

from collections.abc import Callable, Container, Hashable, Iterable
from itertools import combinations
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def spread(rules: Iterable[Any], others: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Cases in which each rule comes up, and each of ``others``, but not each with each.

    As many as the longer of the two: a further rule adds one case, or none.
    """
    rules, others = list(rules), list(others)
    number = max(len(rules), len(others))
    return [(rules[i % len(rules)], *others[i % len(others)]) for i in range(number)]


def texts(case: Any) -> tuple[str, ...]:
    """The values of a case, of which some may have no hash."""
    return tuple(map(str, case))


def pairs(
    cases: Iterable[T],
    settings: Callable[[T], tuple[Hashable, ...]] = texts,
    chosen: Iterable[T] = (),
) -> list[T]:
    """The cases of a table that show each value of each setting, and each pair of values of two.

    ``settings`` returns the values of a case that may interact, always as many; ``chosen`` cases
    are taken anyway. Three settings have no case of their own: a fault that takes three of them is
    left to the tests that draw settings at random. The choice is greedy, and the same at each run.
    """

    def shown(case: T) -> set[Any]:
        return {*combinations(enumerate(settings(case)), 2)}

    cases, taken = list(cases), list(chosen)
    found = [shown(case) for case in cases]
    left = set().union(*found).difference(*map(shown, taken))
    while left:
        best = max(range(len(cases)), key=lambda i: len(found[i] & left))
        left -= found[best]
        taken.append(cases[best])
    return [case for case in cases if case in taken]


def params(cases: Iterable[Any], quick: Container[Any] | Callable[[Any], bool]) -> list[Any]:
    """The parameters of a test: a value or tuple a case; those not ``quick`` are marked slow.

    ``quick`` has the cases that `make test` runs, all of them among ``cases``, or tells of each.
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


def crossed(rules: Iterable[Any], others: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The parameters of each rule with each of ``others``, of which a ``spread`` is not slow."""
    rules, others = list(rules), list(others)
    return params([(rule, *other) for rule in rules for other in others], spread(rules, others))


def paired(rules: Iterable[Any], others: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As ``crossed``, without cases whose pairs of values other cases show."""
    rules, others = list(rules), list(others)
    quick = spread(rules, others)
    return params(
        pairs([(rule, *other) for rule in rules for other in others], chosen=quick), quick
    )
