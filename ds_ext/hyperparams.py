"""Allowed values of hyper-parameters, and errors for invalid values.

A rule's dataclass annotates its fields with these types. ``check`` validates values where they
enter: the JSON config, an optimizer's constructor, param groups, and values from schedulers.
"""

import difflib
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Field, StrictBool, TypeAdapter, ValidationError

from ds_ext.errors import raise_all

_NUMBER = {"strict": True, "allow_inf_nan": False}

NonNegative = Annotated[float, Field(ge=0, description="a number >= 0", **_NUMBER)]
Positive = Annotated[float, Field(gt=0, description="a number > 0", **_NUMBER)]
Negative = Annotated[float, Field(lt=0, description="a number < 0", **_NUMBER)]
Fraction = Annotated[float, Field(ge=0, lt=1, description="a number in [0, 1)", **_NUMBER)]
Count = Annotated[int, Field(gt=0, strict=True, description="a whole number > 0")]
Size = Annotated[int, Field(ge=0, strict=True, description="a whole number >= 0")]
Bits = Literal[8, 32]
Precision = Literal["bf16", "fp32"]
Side = Literal["std", "reverse_std", "left", "right"]
Axis = Literal["row", "column"]

Number = Annotated[float, Field(description="a number", **_NUMBER)]
Triple = tuple[Number, Number, Number]
Coefficients = Annotated[
    Triple | Annotated[tuple[Triple, ...], Field(min_length=1)] | Literal["polar_express"],
    Field(description='a list of 3 numbers, a list of such lists, or "polar_express"'),
]
Adjustment = Literal["original", "match_rms_adamw"]
Sizes = Annotated[tuple[Count, ...], Field(min_length=1, description="a list of whole numbers > 0")]
Scaling = Literal["channel", "tensor"]


@functools.cache
def names(rule: type) -> tuple[str, ...]:
    """Returns the names of a rule's hyper-parameters, in order."""
    return tuple(f.name for f in fields(rule))


class Documentation:
    """A class's ``__doc__``: that of its rule, and its hyper-parameters with their comments.

    The source is read when the documentation is.
    """

    def __get__(self, _: object, optimizer: Any) -> str:
        """Returns the text, in the form of Google."""
        rule = optimizer.hypers
        comments = meanings(rule)
        lines = [f"    {name}: {comments[name]}." for name in names(rule) if name in comments]
        first = ["Args:", "    params: parameters, or groups of them."]
        return "\n".join([inspect.cleandoc(optimizer.rule.__doc__ or ""), "", *first, *lines])


def meanings(rule: type) -> dict[str, str]:
    """Returns the comments beside or above the fields of a dataclass and its bases, by field."""
    found: dict[str, str] = {}
    for base in rule.__mro__:
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # made at run time, or written in C
            continue
        for above, name, beside in _FIELD.findall(source):
            comment = beside or " ".join(line.strip(" #") for line in above.splitlines())
            if comment:
                found.setdefault(name, comment)
    return found


_FIELD = re.compile(r"(?m)^((?:    # .+\n)*)    (\w+): [^#\n]+?(?:  # (.+))?$")


def check(
    rule: type,
    given: Mapping[str, Any],
    where: str = "optimizer.params",
    beside: Collection[str] = (),
) -> dict[str, Any]:
    """Validates hyper-parameters; returns all of a rule's, with defaults for missing ones.

    Args:
        rule: a dataclass whose fields are annotated with the types of this module.
        given: values by name.
        where: the section of the JSON config that contains the values; "" for Python arguments.
        beside: other keys of that section, which an unknown name may misspell.

    Raises:
        ValueError: a name is unknown, or a value is invalid by itself or with the others. The
            message has a line for each, with the key, the given and the allowed values, and the
            closest known key.
    """
    values, problems = checked(rule, given, where, beside)
    raise_all(problems)
    return values


def refuse_misspelt(rule: type, keys: Iterable[str], foreign: Container[str]) -> None:
    """Raises ValueError for a key that is probably meant to be a hyper-parameter of ``rule``.

    Allows other keys, because other code reads them, such as timm's "lr_scale" and SAM's "rho".

    Args:
        rule: a dataclass: see ``check``.
        keys: keys that are not hyper-parameters of ``rule``.
        foreign: hyper-parameters of other rules, which this rule would ignore.
    """
    for key in keys:
        if key in foreign or key in _REFUSED or _meant(key, names(rule), cutoff=0.72):
            raise ValueError(_unknown(rule, key, names(rule)))


_SYNONYMS = {
    **{"learning_rate": "lr", "epsilon": "eps", "wd": "weight_decay"},
    "max_grad_norm": "gradient_clipping",  # HF Trainer's argument
}


def _meant(key: str, known: Collection[str], cutoff: float) -> str | None:
    """The name that ``key`` may misspell. "lr_scale" contains "lr", so it is not a misspelling."""
    plain = key.lower().replace("-", "_").strip("_")
    names = {name: name for name in known} | {k: v for k, v in _SYNONYMS.items() if v in known}
    for near in difflib.get_close_matches(plain, names, n=1, cutoff=cutoff):
        if plain == near or f"_{near}_" not in f"_{plain}_":
            return names[near]
    return None


def meant(key: str, known: Collection[str], places: Iterable[str] = ()) -> str:
    """Returns " Did you mean ...?" for a key of a config that nothing reads, or "".

    Args:
        key: the dotted key.
        known: the names of the keys of its section.
        places: dotted keys of other sections. If a single one of them has the name of ``key``, that
            one is meant.
    """
    name = key.rpartition(".")[2]
    name = _SYNONYMS.get(name, name)
    found = {place for place in places if place.rpartition(".")[2] == name} - {key}
    is_elsewhere = len(found) == 1 and name not in known
    near = found.pop() if is_elsewhere else _meant(name, known, cutoff=0.6)
    return f' Did you mean "{near}"?' if near else ""


def checked(
    rule: type,
    given: Mapping[str, Any],
    where: str,
    beside: Collection[str] = (),
    places: Collection[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Returns what ``check`` does, or {} if a given value is invalid; and the error messages.

    For ``places`` see ``meant``.
    """
    hints, adapters = _hints(rule), _adapters(rule)
    known = [*hints, *beside]
    wrong = [_unknown(rule, dotted(where, key), known, places) for key in given if key not in hints]
    values = {}
    for key in (key for key in given if key in hints):
        try:
            values[key] = adapters[key].validate_python(given[key])
        except ValidationError:
            allowed = describe(hints[key])
            wrong.append(_refused(rule, dotted(where, key), given[key], allowed))
    if wrong:
        return {}, wrong
    try:
        whole = rule(**values)
    except ValueError as error:
        return {}, [f"{rule.__name__}{f' ({where})' * bool(where)}: {error}"]
    return {name: getattr(whole, name) for name in hints}, []


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the closest known name in any case, or "" if none is.

    A name that has all words of ``key`` comes first: of warmup_step, warmup_num_steps.
    """
    by_lower = {name.lower(): name for name in known}
    whole = [name for name in by_lower if all(word in name for word in key.lower().split("_"))]
    near = [x for of in (whole, by_lower) for x in difflib.get_close_matches(key.lower(), of, n=1)]
    return f' Did you mean "{by_lower[near[0]]}"?' if near else ""


def wrong_call(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Returns why a function refuses arguments, with the closest known names; "" if it does not."""
    known = inspect.signature(function)
    try:
        known.bind(*args, **options)
    except TypeError as error:
        unknown = [key for key in options if key not in known.parameters]
        return f"{error}.{''.join(did_you_mean(key, known.parameters) for key in unknown)}"
    return ""


def dotted(where: str, key: str) -> str:
    """Returns a key after its config section ``where``, if that is not empty."""
    return f"{where}.{key}" if where else key


@functools.cache
def _hints(rule: type) -> dict[str, Any]:
    """The annotated types of a rule's fields."""
    return get_type_hints(rule, include_extras=True)


@functools.cache
def _adapters(rule: type) -> dict[str, TypeAdapter[Any]]:
    """The validators of the fields."""
    strict: dict[Any, Any] = {bool: StrictBool, bool | None: StrictBool | None}
    return {key: TypeAdapter(strict.get(hint, hint)) for key, hint in _hints(rule).items()}


def unchecked(rule: type) -> list[str]:
    """Returns the fields of a rule whose types, such as float, would let wrong values pass."""
    return [name for name, hint in _hints(rule).items() if not _is_checked(hint)]


def _is_checked(hint: Any) -> bool:
    if hint in (bool, NoneType, Ellipsis) or get_origin(hint) is Literal:
        return True
    if get_origin(hint) is Annotated:
        return any(getattr(extra, "description", None) for extra in hint.__metadata__)
    return bool(get_args(hint)) and all(map(_is_checked, get_args(hint)))


def describe(hint: Any) -> str:
    """Describes the values that a type allows: "a number >= 0"."""
    for extra in getattr(hint, "__metadata__", ()):
        if getattr(extra, "description", None):
            return str(extra.description)
    options = get_args(hint)
    if get_origin(hint) is Annotated:
        return describe(options[0])
    if get_origin(hint) is Literal or NoneType in options:
        *others, last = _alternatives(hint)
        return f"{', '.join(others)} or {last}" if others else last
    if getattr(hint, "__origin__", None) is tuple:
        return f"a list of {len(options)}: [" + ", ".join(map(describe, options)) + "]"
    return {bool: "true or false"}.get(hint, str(hint))


def _alternatives(hint: Any) -> list[str]:
    """The values that a type allows, with null as the last one."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return [json.dumps(option, default=str) for option in options]
    if NoneType in options:
        return [*(a for o in options if o is not NoneType for a in _alternatives(o)), "null"]
    return [describe(hint)]


_ROWS = "remove it; only rows are split, so a matrix [in, out], as GPT-2's, stays whole."
# Hyper-parameters of version 1.0: the default with which a state loads, and what to do.
REMOVED: dict[str, tuple[Any, str]] = {
    "split_dim": (0, _ROWS),
    "spectral": ("none", "remove it."),
    "spectral_iterations": (1, "remove it."),
    "base_width": (0, 'remove it; an entry of param_groups sets the "lr" of wider matrices.'),
    "width_exponent": (1.0, "remove it."),
}
_REFUSED = {"maximize", "amsgrad", *REMOVED}  # the first two are torch's, and change the step


def _unknown(rule: type, key: str, known: Collection[str], places: Collection[str] = ()) -> str:
    if removed := REMOVED.get(key.rpartition(".")[2]):
        return f"{_whose(rule)}{key} was removed in ds_ext 1.1: {removed[1]}"
    guess = meant(key, known, places)
    return f"{_whose(rule)}unknown key {key}.{guess} Known: {', '.join(known)}."


def _whose(rule: type) -> str:
    """The optimizer's name as a prefix: "AdaLomo: "; empty for a section of a config."""
    return f"{rule.__name__}: " if hasattr(rule, "step") else ""


_FILLED_IN = ("lr", "betas", "eps", "weight_decay")


def _refused(rule: type, key: str, value: Any, allowed: str) -> str:
    message = f"{_whose(rule)}{key} is {value!r}; allowed: {allowed}."
    if value == "auto":
        if key.rpartition(".")[2] == "split":
            return (
                f'{message} "auto" was removed in ds_ext 1.1: list the rows of each part in an '
                'entry of param_groups, as {"match": "qkv_proj", "split": [4096, 1024, 1024]} for '
                "q, k and v."
            )
        is_filled = key.removeprefix("optimizer.params.") in _FILLED_IN
        who = "HF Trainer and accelerate only" if is_filled else "nobody"
        return f'{message} "auto" is filled in by {who}: write a value.'
    if key.rpartition(".")[2] in ("betas", "eps") and "." in key:
        return f'{message} (If "auto" filled it in for Adam: remove the key or write the list.)'
    return message
