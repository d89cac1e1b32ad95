"""What a rule is, and the registry of rules: an optimizer is a dataclass that is registered.

A rule sees the step of one parameter from one rank: its own run ``p`` of the weight, the same run
``g`` of the gradient and what it keeps ``s``. Where it needs a sum over the whole parameter it
yields its partial sums, and is sent back the totals over all ranks.
"""

import difflib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from ds_ext import ops
from ds_ext.ops.shard import Shard
from ds_ext.ops.state import Parts

Sums: TypeAlias = tuple[Tensor, ...]  # fp32 (fp64 for fp64 parameters), of any shapes
Rounds: TypeAlias = Generator[Sums, Sums, None]  # yields partial sums, is sent their totals
State: TypeAlias = dict[str, Any]  # the tensors of ``state_spec``, nested as there


class Rule(Protocol):
    """An optimizer's algorithm: a frozen dataclass whose fields are its hyper-parameters.

    ``weight_decay`` is a field of every rule; each field has a default and one of the types of
    ``ds_ext.hyperparams``, from which values of the JSON config are checked.
    """

    weight_decay: float

    def state_spec(self, shard: Shard) -> Parts:
        """Returns what a rank keeps of a parameter between steps, as parts of a whole state."""
        ...

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        """Steps a run of the weight in place.

        Whether and how often it yields depends on the parameter's shape, the hyper-parameters,
        ``t`` and totals, never on ``len(shard)``: a rank with an empty run takes part.

        Args:
            p: this rank's run of the weight, flat, [len(shard)].
            g: the same run of the gradient.
            s: what ``state_spec`` declared; zeros before the first step.
            t: number of this step, from 1.
            shard: which elements of the whole parameter the run is.
        """
        ...


@dataclass(frozen=True)
class Entry:
    """A registered rule, and what the tables of the documentation say of it."""

    rule: type[Rule]
    paper: str  # arXiv number
    state: str  # bytes per parameter of a matrix [R, C] on each of d ranks
    rounds: str  # all-reduces of a bucket's partial sums
    batched_if: Callable[[Any, Shard], bool] | bool  # see ``is_batched`` of ``register``
    sums_first_if: Callable[[Any, Shard], bool] | bool  # see ``sums_first`` of ``register``
    # How parameters are stepped that the rule is not for, by their role: a group's keys.
    roles: Mapping[str, Mapping[str, Any]]
    any_shape: bool = True  # whether ``step`` is defined for more than matrices
    relative: Callable[[Any], bool] | bool = False  # see ``relative`` of ``register``
    spelling: str = ""  # of its name in papers and configs

    @property
    def is_batched(self) -> bool:
        """Whether ``step`` takes a batch of parameters as it takes one, of some at least."""
        return bool(self.batched_if)

    def batches(self, rule: Rule, shard: Shard) -> bool:
        """Whether ``rule``, one of ``self.rule``, steps a run in a batch; alike on all ranks."""
        given = self.batched_if
        return given(rule, shard) if callable(given) else given

    def sums_first(self, rule: Rule, shard: Shard) -> bool:
        """Whether ``rule``, one of ``self.rule``, yields sums of a run before it writes."""
        given = self.sums_first_if
        return given(rule, shard) if callable(given) else given

    def is_relative(self, rule: Rule) -> bool:
        """Whether the steps of ``rule``, one of ``self.rule``, are in proportion to the weights."""
        return self.relative(rule) if callable(self.relative) else self.relative

    @property
    def others(self) -> str | None:
        """The name of the rule of what this one is not for; None if it is for all."""
        return self.roles.get("other", {}).get("type")

    @property
    def summary(self) -> str:
        """The first sentence of the rule's docstring."""
        return (self.rule.__doc__ or "").strip().partition("\n")[0]


REGISTRY: dict[str, Entry] = {}  # by the lower-case name of the rule
_subscribers: list[Callable[[str], None]] = []

R = TypeVar("R", bound=type)


def register(
    *,
    paper: str,
    state: str,
    rounds: str,
    is_batched: Callable[[Any, Shard], bool] | bool = False,
    sums_first: Callable[[Any, Shard], bool] | bool = False,
    others: Mapping[str, Any] | None = None,
    embedding: Mapping[str, Any] | None = None,
    head: Mapping[str, Any] | None = None,
    any_shape: bool | None = None,
    relative: Callable[[Any], bool] | bool = False,
    spelling: str | None = None,
) -> Callable[[R], R]:
    """Makes a rule an optimizer: ``"type"`` in a DeepSpeed config, and in every table.

    Args:
        paper: the algorithm's arXiv number.
        state: bytes per parameter of a matrix [R, C] on each of d ranks, as a formula.
        rounds: all-reduces of a bucket's partial sums in a step.
        is_batched: whether ``step`` takes a batch where it takes a parameter: it is made of
            passes of ``ops`` that do, and of formulas that hold for vectors of numbers [n]. Or a
            function of a rule and a run that tells it by hyper-parameters and geometry, alike on
            all ranks.
        sums_first: whether ``step`` yields sums of the gradient before it writes the weight or its
            state, so that the first round checks the gradient: a bad one has had no effect yet.
            Or a function, as for ``is_batched``. If it is False, gradients are read once more.
        others: for a rule of the matrices of linear layers: the keys of the param group of all
            other parameters, such as {"type": "AdamW"}.
        embedding: those of embeddings, if they differ.
        head: those of the output head, if they differ.
        any_shape: whether ``step`` is defined for more than matrices, which a script's own param
            group may hold. Default: False if ``others`` has a type, else True.
        relative: whether a step is in proportion to the size of the weights, so that ``lr`` is
            relative to that, and a matrix of zeros hardly moves; or a function of a rule.
        spelling: its name in papers, if that has dashes; configs may write either.

    Raises:
        ValueError: another rule has this name.
    """

    def decorate(rule: R) -> R:
        name = rule.__name__.lower()
        known = REGISTRY.get(name)
        if known is not None and _full_name(known.rule) != _full_name(rule):
            raise ValueError(f"a rule named {rule.__name__} is registered already: rename one.")
        roles = {}
        if others is not None:
            roles = {"other": others, "embedding": embedding or others, "head": head or others}
        is_for_all = "type" not in (others or {}) if any_shape is None else any_shape
        spelled = spelling or rule.__name__
        REGISTRY[name] = Entry(
            rule, paper, state, rounds, is_batched, sums_first, roles, is_for_all, relative, spelled
        )
        for tell in _subscribers:
            tell(name)
        return rule

    return decorate


def _full_name(rule: type) -> str:
    return f"{rule.__module__}.{rule.__qualname__}"


def key_of(name: str) -> str:
    """Returns the key of a name as configs write it: "ds_ext.APOLLO-Mini" -> "apollomini"."""
    return name.lower().removeprefix("ds_ext.").replace("-", "")


def named(name: Any, key: str = "optimizer.type") -> Entry:
    """Returns the registered rule that a config names: see ``key_of``.

    Raises:
        ValueError: there is none; it tells the ``key`` of the config and what may have been meant.
    """
    wanted = key_of(name) if isinstance(name, str) else ""
    if wanted in REGISTRY:
        return REGISTRY[wanted]
    near = [REGISTRY[x].rule.__name__ for x in difflib.get_close_matches(wanted, REGISTRY, n=1)]
    guess = f' Did you mean "{near[0]}"?' if near else ""
    known = ", ".join(entry.rule.__name__ for entry in REGISTRY.values())
    raise ValueError(f"{key} is {name!r}, no optimizer of ds_ext.{guess} Known: {known}.")


def entry_of(rule: type) -> Entry:
    """Returns what is registered of a rule, or of a class that adds hyper-parameters to it."""
    return REGISTRY[rule.__name__.lower()]


def subscribe(tell: Callable[[str], None]) -> None:
    """Calls ``tell`` with the lower-case name of every rule: those registered, and later ones."""
    _subscribers.append(tell)
    for name in REGISTRY:
        tell(name)
