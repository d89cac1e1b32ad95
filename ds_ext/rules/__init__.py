"""The rules, one algorithm per file. A rule is a generator that steps one rank's run.

A rule's file does not import the others. ``all_rules`` imports, and so registers, every rule.
"""

from ds_ext.rules.base import REGISTRY, Rule, RuleEntry, State, entry_of, named, register

__all__ = ["REGISTRY", "RuleEntry", "Rule", "State", "entry_of", "named", "register"]
