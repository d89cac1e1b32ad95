"""Makes a ``torch.optim.Optimizer`` of a rule: groups, state, a plain ``step()``.

``OPTIMIZERS["adalomo"]`` is the class of the rule AdaLomo, as ``ds_ext.AdaLomo``.
"""

import functools
from collections.abc import Iterator, Mapping

from ds_ext import rules
from ds_ext.hyperparams import Documentation
from ds_ext.ops import functions
from ds_ext.ops.executors.unbatched import passes_of_run
from ds_ext.optimizer.rule_optimizer import RuleOptimizer as RuleOptimizer
from ds_ext.rules import all_rules as all_rules  # registers them

functions.use(passes_of_run)


@functools.cache
def _optimizer_of(rule: type[rules.Rule]) -> type[RuleOptimizer]:
    """The optimizer that steps by ``rule``, under the rule's name."""
    body = {"rule": rule, "__doc__": Documentation(), "__module__": "ds_ext"}
    return type(rule.__name__, (RuleOptimizer,), body)


class _Optimizers(Mapping[str, type[RuleOptimizer]]):
    """An optimizer for each registered rule, by the rule's name in lower case."""

    def __getitem__(self, name: str) -> type[RuleOptimizer]:
        return _optimizer_of(rules.REGISTRY[name].rule)

    def __iter__(self) -> Iterator[str]:
        return iter(rules.REGISTRY)

    def __len__(self) -> int:
        return len(rules.REGISTRY)


OPTIMIZERS = _Optimizers()


def named(name: str, key: str = "optimizer.type") -> type[RuleOptimizer]:
    """Returns the optimizer that a config names, in any case, with or without "ds_ext.".

    Raises:
        ValueError: there is none; the message has the config's ``key`` and the nearest name.
    """
    return _optimizer_of(rules.named(name, key).rule)
