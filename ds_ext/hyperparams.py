"""What values a hyper-parameter may take, and the error that a user sees when one is wrong.

A rule's dataclass annotates its fields with these types; ``check`` is called where values enter
(the JSON config, an optimizer's constructor, a param group, what a scheduler sets there).
"""

import difflib
import functools
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field, Strict, TypeAdapter, ValidationError

_NUMBER = {"strict": True, "allow_inf_nan": False}

NonNegative = Annotated[float, Field(ge=0, description="a number >= 0", **_NUMBER)]
Positive = Annotated[float, Field(gt=0, description="a number > 0", **_NUMBER)]
Negative = Annotated[float, Field(lt=0, description="a number < 0", **_NUMBER)]
Fraction = Annotated[float, Field(ge=0, lt=1, description="a number in [0, 1)", **_NUMBER)]
Count = Annotated[int, Field(gt=0, strict=True, description="a whole number > 0")]
Size = Annotated[int, Field(ge=0, strict=True, description="a whole number >= 0")]
Bits = Annotated[Literal[8, 32], Field(description="8 or 32")]
Side = Annotated[
    Literal["std", "reverse_std", "left", "right"],
    Field(description='"std", "reverse_std", "left" or "right"'),
]
Axis = Annotated[Literal["row", "column"], Field(description='"row" or "column"')]

Number = Annotated[float, Field(description="a number", **_NUMBER)]
Adjustment = Annotated[
    Literal["original", "match_rms_adamw"], Field(description='"original" or "match_rms_adamw"')
]
Scaling = Annotated[Literal["channel", "tensor"], Field(description='"channel" or "tensor"')]


@functools.cache
def names(rule: type) -> tuple[str, ...]:
    """Returns the names of a rule's hyper-parameters, in order."""
    return tuple(f.name for f in fields(rule))


def check(rule: type, given: Mapping[str, Any], where: str = "optimizer.params") -> dict[str, Any]:
    """Returns all hyper-parameters of a rule: the given ones checked, the others' defaults.

    Args:
        rule: a dataclass whose fields are annotated with the types of this module.
        given: values by name.
        where: the section of the JSON config that they come from.

    Raises:
        ValueError: a name is unknown, or a value is not allowed, alone or beside the others. It
            names the key, what was given, what is allowed, and what a misspelt key may have meant.
    """
    checked, found = _checked(rule, given, where)
    if found:
        raise ValueError(found[0])
    return checked


def problems(rule: type, given: Mapping[str, Any], where: str = "optimizer.params") -> list[str]:
    """Returns all that ``check`` would raise, each in words."""
    return _checked(rule, given, where)[1]


def _checked(rule: type, given: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """All hyper-parameters, if nothing is wrong with the given ones; and what is."""
    hints, adapters = _hints(rule), _adapters(rule)
    wrong = [_unknown(rule, f"{where}.{key}", list(hints)) for key in given if key not in hints]
    checked = {}
    for key in (key for key in given if key in hints):
        try:
            checked[key] = adapters[key].validate_python(given[key])
        except ValidationError:
            allowed = describe(hints[key])
            wrong.append(_refused(rule, f"{where}.{key}", given[key], allowed))
    if wrong:
        return {}, wrong
    try:
        whole = rule(**checked)
    except ValueError as error:
        return {}, [f"{rule.__name__} ({where}): {error}"]
    return {name: getattr(whole, name) for name in hints}, []


@functools.cache
def _hints(rule: type) -> dict[str, Any]:
    """The annotated types of a rule's fields."""
    return get_type_hints(rule, include_extras=True)


@functools.cache
def _adapters(rule: type) -> dict[str, TypeAdapter[Any]]:
    """What checks the value of each field."""
    return {key: TypeAdapter(_strict_bool(hint)) for key, hint in _hints(rule).items()}


def describe(hint: Any) -> str:
    """Returns what a field's type allows, in words: "a number >= 0"."""
    for extra in getattr(hint, "__metadata__", ()):
        if getattr(extra, "description", None):
            return str(extra.description)
    options = get_args(hint)
    if NoneType in options:
        return " or ".join(describe(o) for o in options if o is not NoneType) + " or null"
    if getattr(hint, "__origin__", None) is tuple:
        return f"a list of {len(options)}: [" + ", ".join(map(describe, options)) + "]"
    return {bool: "true or false"}.get(hint, str(hint))


def _strict_bool(hint: Any) -> Any:
    return Annotated[bool, Strict()] if hint is bool else hint


def _unknown(rule: type, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
    guess = f' Did you mean "{near[0]}"?' if near else ""
    return f"{rule.__name__}: unknown key {key}.{guess} Known: {', '.join(known)}."


def _refused(rule: type, key: str, value: Any, allowed: str) -> str:
    message = f"{rule.__name__}: {key} is {value!r}; allowed: {allowed}."
    if value == "auto":
        return f'{message} "auto" is filled in by HF Trainer and accelerate only: write a value.'
    if key.endswith((".betas", ".eps")):
        return f'{message} (If "auto" filled it in for Adam: remove the key or write the list.)'
    return message
