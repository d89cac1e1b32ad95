"""Several rules in one model under an engine: ``param_groups`` of the JSON config."""

import galore_torch
import pytest
import torch

from tests import worlds
from tests.common import models, updates
from tests.common.authors import ordinary
from tests.common.choose import params
from tests.distributed import param_groups_jobs

CASES = [(ranks, stage) for ranks in (2, 3) for stage in range(4)]


def by_hand(model):
    """The authors' optimizers, each of the parameters that it is for."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    ends = [n for n in named if "embed" in n or n == "up.weight"]
    vectors = [n for n in named if "norm" in n or n.endswith("bias")]
    rest = [n for n in named if n not in ends and n not in vectors]
    return [
        ordinary("adalomo", [{"params": [named[n] for n in rest]}], {"lr": 0.02}),
        galore_torch.GaLoreAdamW([named[n] for n in ends], lr=3e-3),
        torch.optim.SGD([named[n] for n in vectors], lr=0.1),
    ]


def by_role(kind):
    """Optimizers of linear layers, of the embedding and of all else: of ``kind``, or its others."""

    def of(model):
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        layers = [n for n in named if n in ("up.weight", "down.weight", "shared.weight")]
        layers += [n for n in named if n in ("odd.weight", "unused.weight")]
        made = [ordinary(kind, [{"params": [named.pop(n) for n in layers]}], {"lr": 0.02})]
        if kind == "scale":
            hypers = {"lr": 0.02, "norm_axis": "column"}
            made.append(ordinary(kind, [{"params": [named.pop("embed.weight")]}], hypers))
        other = "adamw" if kind == "scale" else "flashadamw"
        rest = [{"params": list(named.values()), "weight_decay": 0.0}]
        return [*made, ordinary(other, rest, {"lr": 0.02})]

    return of


def check(got, ranks, optimizers):
    """The weights, and those of a run that was resumed, are those of one process."""
    torch.manual_seed(0)
    model = models.Zoo()
    param_groups_jobs.reference(ranks, optimizers(model), model)
    expected, before = dict(model.named_parameters()), got["before"]
    updates.check(got["after"], expected, before, param_groups_jobs.STEPS)
    updates.check_each(
        got.get("resumed", got["after"]), got["after"], before, param_groups_jobs.STEPS
    )


@pytest.mark.parametrize(
    "kind, stage",
    params([(k, s) for k in ("SCALE", "SinkGD") for s in range(4)], {("SCALE", 2), ("SinkGD", 3)}),
)
def test_a_rule_of_linear_layers_leaves_the_rest_to_others(kind, stage):
    got = worlds.run(2, param_groups_jobs.by_role, stage, kind)[0]
    assert got["identical"]
    check(got, 2, by_role(kind.lower()))


@pytest.mark.parametrize("ranks, stage", params(CASES, {(2, 1), (2, 3)}))
def test_each_parameter_is_stepped_by_its_own_rule(ranks, stage, tmp_path):
    got = worlds.run(ranks, param_groups_jobs.train, stage, str(tmp_path))[0]
    assert got["identical"]
    check(got, ranks, by_hand)
    said = " ".join(got["said"])
    assert "LOMO, lr=0.1 on: up.bias" in said and "AdaLomo on: " in said
    assert (
        "group 2 of this checkpoint was saved with LOMO, but the optimizer has LAMB"
        in got["refused"]
    )


def test_wrong_entries_are_refused_on_all_ranks():
    entry = {"match": "nrom", "type": "LOMO"}
    for told in worlds.run(2, param_groups_jobs.refused, 3, entry):
        assert "optimizer.params.param_groups[0].match: 'nrom'" in told
        assert 'Did you mean "norm"?' in told


def test_groups_of_a_script_keep_their_own_weight_decay():
    assert worlds.run(2, param_groups_jobs.grouped_by_script, 2) == [[0.1, 0.0]] * 2
