"""The Rule protocol, and the registry of rules. An optimizer is a registered dataclass.

A rule steps one parameter on one rank. It receives the rank's run ``p`` of the weight, the same run
``g`` of the gradient, and its state ``s``. When it needs a sum over the whole parameter, it yields
partial sums and receives the totals over all ranks.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

from ds_ext import ops
from ds_ext.hyperparams import did_you_mean, unchecked, wrong_call
from ds_ext.ops.expressions import Sums as Sums
from ds_ext.ops.shard import Shard
from ds_ext.ops.sixteen_bit import RoundingConfig
from ds_ext.ops.state import Part, Parts, leaves
from ds_ext.ops.state import State as State

Rounds: TypeAlias = Generator[Sums, Sums, None]  # yields partial sums, receives their totals
Condition: TypeAlias = Callable[[Any, Shard], bool]  # of a rule and a shard
GroupKeys: TypeAlias = Mapping[str, Any]  # of a param group


class Rule(Protocol):
    """An optimizer's algorithm: a frozen dataclass whose fields are its hyper-parameters.

    Every rule has the field ``lr``; decoupled weight decay is the field ``weight_decay``. Each
    field has a default. Its type is bool, or made of types from ``ds_ext.hyperparams``, which
    validates values of the JSON config.
    """

    def state_spec(self, shard: Shard) -> Parts:
        """Declares a rank's state for a parameter, as parts of the whole parameter's state."""
        ...

    def step(self, p: ops.Writable, g: ops.Gradient, s: State, t: int, shard: Shard) -> Rounds:
        """Steps a run of the weight in place. A rule that needs no totals may have no ``yield``.

        The number of yields may depend on the parameter's shape, the hyper-parameters, ``t`` and
        totals, but not on ``len(shard)``: ranks with empty runs take part in every round.

        Args:
            p: this rank's run of the weight, flat, [len(shard)].
            g: the same run of the gradient.
            s: the state that ``state_spec`` declares; zeros before the first step.
            t: the number of this step, from 1.
            shard: the position of the run in the whole parameter.
        """
        ...


@dataclass(frozen=True)
class RuleEntry:
    """A registered rule, and its properties in the tables of the documentation."""

    rule: type[Rule]
    paper: str  # arXiv number
    state: str  # bytes per parameter of a matrix [R, C] on each of d ranks
    rounds: str  # all-reduces of a bucket's partial sums
    # Whether a rule steps a run in a batch, and whether it yields a run's sums before it writes
    # weights or state; equal on all ranks.
    batches: Condition
    sums_first: Condition
    is_batched: bool  # whether ``step`` accepts batches, at least of some parameters
    is_flat: bool  # whether ``step`` takes any parameter as a vector
    # By role, the param group's keys for parameters that this rule does not step.
    roles: Mapping[str, GroupKeys]
    any_shape: bool  # whether ``step`` is defined for more than matrices
    is_relative: Callable[[Any], bool]  # whether a rule's updates are proportional to the weights
    spelling: str  # the name as papers and configs spell it
    has_sections: bool  # see ``register``
    shared_work: Callable[[Any, Shard], float] | None  # see ``register``

    @property
    def is_own(self) -> bool:
        """Whether the rule is part of ds_ext."""
        return self.rule.__module__.startswith("ds_ext.")

    @property
    def others(self) -> str | None:
        """The name of the rule that steps all other parameters; None if this rule steps all."""
        return self.roles.get("other", {}).get("type")

    @property
    def summary(self) -> str:
        """The first line of the rule's docstring."""
        return (self.rule.__doc__ or "").strip().partition("\n")[0]


REGISTRY: dict[str, RuleEntry] = {}  # by the lower-case name of the rule

# Names that ds_ext uses itself: of the entries of a parameter's state, and of the keys of param
# groups. A rule may share ``seed``, if it declares it as ds_ext does.
RESERVED_STATE = frozenset({"ema", "experts", "marks", "master", "step"})
RESERVED_FIELDS = frozenset(
    {"params", "name", "type", "weight_update", "seed", "ema_decay", "ema_dtype"}
    | {"split", "heads"}
)
_SHARED_SEED = next(f for f in dataclasses.fields(RoundingConfig) if f.name == "seed")

_TAKEN = ("self", "p", "g", "s", "t", "shard")  # the parameters of ``step``
_TYPES = "says which values it may have (NonNegative, … of ds_ext.hyperparams; bool; Literal)"

R = TypeVar("R", bound=type)
P = ParamSpec("P")
T = TypeVar("T")


def _explained(function: Callable[P, T]) -> Callable[P, T]:
    """Returns ``register``, with errors that say how it is written."""

    @functools.wraps(function)
    def explained(*args: P.args, **options: P.kwargs) -> T:
        if wrong := wrong_call(function, *args, **options):
            usage = '@register(paper="", state="4/d", rounds="0")'
            raise TypeError(f"register: {wrong} Write it as {usage}.")
        return function(*args, **options)

    return explained


@_explained
def register(
    *,
    paper: str,
    state: str,
    rounds: str,
    is_batched: Condition | bool = False,
    sums_first: Condition | bool = False,
    is_flat: bool = False,
    others: GroupKeys | None = None,
    embedding: GroupKeys | None = None,
    head: GroupKeys | None = None,
    any_shape: bool | None = None,
    relative: Callable[[Any], bool] | bool = False,
    spelling: str | None = None,
    has_sections: bool = False,
    shared_work: Callable[[Any, Shard], float] | None = None,
) -> Callable[[R], R]:
    """Registers a rule as an optimizer: a ``"type"`` in DeepSpeed configs, and a row in tables.

    Args:
        paper: the algorithm's arXiv number.
        state: bytes per parameter of a matrix [R, C] on each of d ranks, as a formula.
        rounds: the number of all-reduces of a bucket's partial sums in a step.
        is_batched: whether ``step`` also accepts a batch of parameters. It must then read tensors
            only by passes of ``ops`` (not ``blocks``, ``evaluate`` or ``pad``),
            use formulas that hold for vectors [n], and pass only expressions for which native code
            and kernels have a form; a pass raises TypeError for others. If its state has other
            dtypes than fp32 and those of 8-bit formats, parameters are stepped one by one anyway.
            Or a function of a rule and a shard that returns it, with the same result on all ranks.
        sums_first: whether ``step`` yields sums of the gradient before it writes weights or state.
            The first round of a batch then detects bad gradients before they have an effect. Or a
            function, as for ``is_batched``. If it is False, gradients are read once more.
        is_flat: whether ``step`` treats a matrix as the vector of its elements. Then matrices and
            vectors are stepped in one batch, with half the passes.
        others: for a rule that steps only the matrices of linear layers: the param group keys of
            all other parameters, such as {"type": "AdamW"}.
        embedding: the keys of embeddings, if they differ from ``others``.
        head: the keys of the output head, if they differ from ``others``.
        any_shape: whether ``step`` is defined for tensors other than matrices, which a script's own
            param group may contain. Default: False if ``others`` has a type, else True.
        relative: whether updates are proportional to the size of the weights. ``lr`` is then
            relative to this size, and a matrix of zeros hardly moves. Or a function of a rule.
        spelling: the name in papers, if it contains dashes. Configs accept both names.
        has_sections: whether sections of a matrix may be stepped as separate matrices, named by the
            keys ``split`` and ``heads``. The state must have one number per element.
        shared_work: for a rule in which one rank computes something for all (``Shard.has_turn``):
            a function of a rule and a shard that returns its cost, in any unit. The ranks share
            the matrices of a bucket by this cost.

    Raises:
        ValueError: another rule, or something else of ds_ext, has this name, or a field has a name
            that ds_ext uses itself.
        TypeError: the class is no dataclass, lacks ``lr``, ``state_spec`` or ``step``, a field has
            no default, or ``step`` has its parameters in another order.
    """

    def decorate(rule: R) -> R:
        name = rule.__name__.lower()
        known = REGISTRY.get(name)
        if known is not None and _full_name(known.rule) != _full_name(rule):
            raise ValueError(f"a rule named {rule.__name__} is registered already: rename one.")
        ours = sys.modules["ds_ext"]
        if known is None and rule.__name__ in {*vars(ours), *dir(ours)}:
            what = f"ds_ext.{rule.__name__} exists and is no optimizer"
            raise ValueError(f"{what}: rename the class.")
        _refuse_incomplete(rule)
        _refuse_reserved_fields(rule)
        own: Any = rule
        own.__init__ = _by_name(own.__init__, rule.__name__)
        if not inspect.isgeneratorfunction(own.step):
            own.step = _as_rounds(own.step)
        roles = {}
        if others is not None:
            roles = {"other": others, "embedding": embedding or others, "head": head or others}
        is_for_all = "type" not in (others or {}) if any_shape is None else any_shape
        conditions = _condition(is_batched), _condition(sums_first), bool(is_batched)
        REGISTRY[name] = RuleEntry(
            *(rule, paper, state, rounds, *conditions, is_flat, roles, is_for_all),
            *(_condition(relative), spelling or rule.__name__, has_sections, shared_work),
        )
        return rule

    return decorate


def _condition(given: Callable[..., bool] | bool) -> Callable[..., bool]:
    """Returns a condition as a function; a value is one of all rules and shards."""
    return given if callable(given) else lambda *of: given


def _refuse_incomplete(rule: type) -> None:
    """Raises TypeError if a class lacks what every rule has, or ``step`` has another order."""
    missing = [f"the method {name}" for name in ("state_spec", "step") if not hasattr(rule, name)]
    if not dataclasses.is_dataclass(rule):
        missing.insert(0, "@dataclass(frozen=True), below @register")
    elif not rule.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        missing.insert(0, "frozen=True of its @dataclass")
    else:
        hypers = inspect.signature(rule).parameters
        missing += ["the field lr"] if "lr" not in hypers else []
        bare = [name for name in hypers if hypers[name].default is inspect.Parameter.empty]
        missing += [f"a default of the field {name}" for name in bare]
        missing += [f"a type of the field {name} that {_TYPES}" for name in unchecked(rule)]
    if missing:
        raise TypeError(f"the rule {rule.__name__} lacks {', '.join(missing)}.")
    own: Any = rule
    taken = [*inspect.signature(own.step).parameters]
    if any(x in _TAKEN and x != y for x, y in zip(taken, _TAKEN, strict=False)):
        raise TypeError(f"{rule.__name__}.step takes {taken}; allowed: {[*_TAKEN]}, in this order.")


def _by_name(init: Callable[..., None], name: str) -> Callable[..., None]:
    """Returns the ``__init__`` of a rule as one that refuses parameters of a model."""

    @functools.wraps(init)
    def by_name(rule: Any, *unnamed: Any, **hypers: Any) -> None:
        if unnamed:
            raise TypeError(
                f"{name} is a rule, whose hyper-parameters are given by name. The optimizer is "
                f"ds_ext.{name}(params, lr=...)."
            )
        init(rule, **hypers)

    return by_name


def _as_rounds(step: Callable[..., Any]) -> Callable[..., Rounds]:
    """Returns a step without ``yield`` as one that takes no rounds."""

    @functools.wraps(step)
    def rounds(rule: Any, p: Any, g: Any, s: Any, t: Any, shard: Shard) -> Rounds:
        result = step(rule, p, g, s, t, shard)
        if result is not None and not inspect.isgenerator(result):
            raise TypeError(
                f"{type(rule).__name__}.step returned {type(result).__name__}: return nothing, and "
                "write the weight with ops.apply_(p, update, shard, lr=self.lr)."
            )
        yield from result or ()

    return rounds


def _refuse_reserved_fields(rule: type) -> None:
    """Raises ValueError if a hyper-parameter of a rule has a name that ds_ext uses itself."""
    for field in dataclasses.fields(rule):
        if field.name not in RESERVED_FIELDS:
            continue
        own, ours = ((f.type, f.default) for f in (field, _SHARED_SEED))
        if field.name != "seed" or own != ours:
            raise ValueError(
                f"{rule.__name__} has a hyper-parameter named {field.name}, which ds_ext uses "
                "itself: rename the field."
            )


def check_spec(rule: type, parts: Parts) -> Parts:
    """Returns the result of a rule's ``state_spec``.

    Raises:
        TypeError: it is no dict, or has something other than parts.
        ValueError: a key is one that ds_ext uses itself.
    """
    declared = [part for _, part in leaves(parts)] if isinstance(parts, Mapping) else [parts]
    for x in declared:
        if not isinstance(x, Part):
            raise TypeError(
                f"{rule.__name__}.state_spec returned {type(x).__name__}, which declares no state: "
                'return a dict of parts, such as {"m": Part.like(shard)}.'
            )
    for key in sorted(RESERVED_STATE & parts.keys()):
        raise ValueError(
            f'the state of {rule.__name__} has the key "{key}", which ds_ext uses itself: rename '
            "it in state_spec."
        )
    return parts


def _full_name(rule: type) -> str:
    return f"{rule.__module__}.{rule.__qualname__}"


def key_of(name: str) -> str:
    """Returns the registry key of a name in a config: "ds_ext.APOLLO-Mini" -> "apollomini"."""
    return name.lower().removeprefix("ds_ext.").replace("-", "")


def named(name: Any, key: str = "optimizer.type", theirs: Iterable[str] | None = None) -> RuleEntry:
    """Returns the registered rule that a config names: see ``key_of``.

    Args:
        name: the name.
        key: the config's key, for the message.
        theirs: the names of DeepSpeed's optimizers, if these and torch's are allowed too.

    Raises:
        ValueError: there is none. The message has the config's ``key`` and the closest known name.
    """
    wanted = key_of(name) if isinstance(name, str) else ""
    if wanted in REGISTRY:
        return REGISTRY[wanted]
    known = [entry.spelling for entry in REGISTRY.values()]
    if wanted and wanted != name.lower():  # it has the prefix, without which DeepSpeed's are meant
        guess = did_you_mean(name, [f"ds_ext.{spelling}" for spelling in known])
    else:
        guess = did_you_mean(wanted, [*known, *(theirs or ())])
    kind = "a ds_ext optimizer" if theirs is None else "one of ds_ext, DeepSpeed or torch.optim"
    raise ValueError(
        f"{key} is {name!r}, which is not {kind}.{guess} Optimizers of ds_ext: "
        f"{', '.join(known)}; and yours, once their module is imported (--import MODULE)."
    )


def entry_of(rule: type) -> RuleEntry:
    """Returns the entry of a rule, or of a class that adds hyper-parameters to a rule.

    Raises:
        ValueError: the class is not registered.
    """
    entry = REGISTRY.get(rule.__name__.lower())
    if entry is None:
        raise ValueError(
            f"{rule.__name__} is not registered: put @register(…), of ds_ext.rules.base, above its "
            "@dataclass."
        )
    return entry
