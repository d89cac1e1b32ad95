"""Checks for tests of your own rules: docs/adding-an-optimizer.md."""

import torch

from ds_ext import rules
from ds_ext.optimizer import RuleOptimizer
from ds_ext.rules import Rule
from ds_ext.testing import properties
from ds_ext.testing.properties import Reference
from ds_ext.testing.simulation import Shape

SHAPES: tuple[Shape, ...] = ((13, 29), (5,), (), (7, 1), (1, 40), (4, 3, 5), (64, 33), (16, 16))
WORLDS = (2, 3, 7)

__all__ = ["SHAPES", "WORLDS", "Reference", "check_rule"]


def check_rule(
    rule: Rule | type[Rule],
    *,
    reference: Reference | None = None,
    shapes: tuple[Shape, ...] = SHAPES,
    worlds: tuple[int, ...] = WORLDS,
    half_error: float = 2e-2,
) -> None:
    """Checks that a rule has the properties of all rules of ds_ext, without ranks or a GPU.

    A rule is the same on any number of ranks, in fp64 within 1e-9 of the update; depends on ``lr``,
    and on ``weight_decay`` if it has one; does not write to what ``ops.read`` returns; keeps the
    state that ``state_spec`` declares; yields before it writes if it is registered with
    ``sums_first``; resumes with the same bits; works with bf16 and fp16 weights; stays finite where
    gradients are zero; and is the same in a batch as alone.

    Args:
        rule: a registered rule with its hyper-parameters, such as ``HeavyBall(lr=1e-3)``, or its
            class.
        reference: returns a torch optimizer of some parameters, which computes the same in fp64,
            within 1e-9 of the update, such as
            ``lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)``; None to compare the
            rule only with itself.
        shapes: of the parameters, in elements. Those that are not matrices are left out if the rule
            is for matrices only.
        worlds: numbers of ranks to simulate.
        half_error: the largest error with 16-bit weights that have masters, relative to the update.

    Raises:
        AssertionError: the rule lacks a property, which the message names.
        ValueError: the rule is not registered.
    """
    if isinstance(rule, type) and issubclass(rule, RuleOptimizer):
        raise TypeError(f"give the rule {rule.__name__} of your module, not the optimizer {rule}.")
    made = rule() if isinstance(rule, type) else rule
    if not rules.entry_of(type(made)).any_shape:
        shapes = tuple(shape for shape in shapes if len(shape) == 2)
    try:
        if reference is not None:
            properties.equals_reference(made, reference, shapes)
        for world in worlds:
            properties.is_the_same_on_ranks(made, world, shapes)
        properties.only_reads_what_it_reads(made, shapes)
        properties.keeps_its_state_spec(made, shapes)
        properties.yields_before_it_writes(made, shapes)
        properties.resumes(made, shapes)
        properties.endures_zeros(made, shapes)
        for half in (torch.bfloat16, torch.float16):
            properties.works_in(made, half, shapes, half_error)
        properties.equals_itself_in_a_batch(made, shapes)
        properties.uses_its_hypers(made, shapes)
    except (KeyError, RuntimeError) as error:
        advice = " (state_spec does not declare it)" if isinstance(error, KeyError) else ""
        if "Boolean value of Tensor" in str(error):
            advice = " (a total is a vector in a batch: write torch.where for a branch)"
        raise AssertionError(properties.lacks(made, f"runs: {error!r}{advice}")) from error
