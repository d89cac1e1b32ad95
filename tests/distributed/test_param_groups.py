"""The JSON config: several rules in one model by ``param_groups``, and which names are ours."""

import functools

import galore_torch
import pytest
import torch

from tests import worlds
from tests.common import by_role, engines, models, updates
from tests.common.authors import ordinary
from tests.common.choose import params
from tests.common.updates import check_each
from tests.distributed import param_groups_jobs

CASES = [(ranks, stage) for ranks in (2, 3) for stage in range(4)]


def by_hand(model):
    """The authors' optimizers, each of the parameters that it is for."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    ends = [n for n in named if "embed" in n or n == "up.weight"]
    vectors = [n for n in named if "norm" in n or n.endswith("bias")]
    rest = [n for n in named if n not in ends and n not in vectors]
    each = [
        ordinary("adalomo", [{"params": [named[n] for n in rest]}], {"lr": 0.02}),
        galore_torch.GaLoreAdamW([named[n] for n in ends], lr=3e-3),
        torch.optim.SGD([named[n] for n in vectors], lr=0.1),
    ]
    return by_role.Several(each)


@pytest.mark.parametrize("ranks, stage", params(CASES, {(2, 1), (2, 3)}))
def test_each_parameter_is_stepped_by_its_own_rule(ranks, stage, tmp_path):
    got = worlds.run(ranks, param_groups_jobs.train, stage, str(tmp_path))[0]
    assert got["identical"]
    torch.manual_seed(0)
    model, steps, before = models.Zoo(), param_groups_jobs.STEPS, got["before"]
    loss = functools.partial(param_groups_jobs.zoo_loss, world=ranks)
    alone = engines.alone(model, by_hand(model), loss, steps, ranks, param_groups_jobs.CLIP)
    updates.check(got["after"], alone.after, before, steps)
    check_each(got["resumed"], got["after"], before, steps)
    said = " ".join(got["said"])
    assert "LOMO, lr=0.1 on: up.bias" in said and "AdaLomo on: " in said
    assert (
        "group 2 of this checkpoint was saved with LOMO, but the optimizer has LAMB"
        in got["refused"]
    )


def test_groups_of_a_script_keep_their_own_weight_decay():
    assert worlds.run(2, param_groups_jobs.grouped_by_script, 2) == [[0.1, 0.0]] * 2


OURS = ["AdamW is ds_ext's, not DeepSpeed's, whose type is \"AdamW\""]


def by_torch(spares_biases):
    """The weights after the job's steps by torch's AdamW in one process."""
    model = param_groups_jobs.network()
    decayed = [p for p in model.parameters() if p.dim() > 1 or not spares_biases]
    others = [p for p in model.parameters() if p.dim() == 1 and spares_biases]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=param_groups_jobs.LR,
        betas=(0.9, 0.99),
        weight_decay=param_groups_jobs.DECAY,
    )
    return engines.alone(model, optimizer, param_groups_jobs.loss_of, 4)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["ds_ext.AdamW", "DS_EXT.adamw", "AdamW"])
def test_a_name_that_both_have_is_deepspeeds_without_the_prefix(name, stage):
    ours = name != "AdamW"
    before, expected, _ = by_torch(spares_biases=ours)
    # torch_adam is DeepSpeed's: not its fused one, which it would have to build first
    params = param_groups_jobs.ADAMW | ({} if ours else {"torch_adam": True})
    for rank, got in enumerate(worlds.once(2, param_groups_jobs.taken, name, stage, params)):
        assert got["class"].startswith("ds_ext.AdamW" if ours else ("torch.", "deepspeed."))
        assert got["said"] == (OURS if ours and not rank else [])
        check_each(got["weights"], expected, before)


@pytest.mark.parametrize("name, said", [("LAMB", 1), ("ds_ext.lamb", 1), ("ds_ext.AdaLomo", 0)])
def test_names_of_ours_take_ours(name, said):
    for rank, got in enumerate(worlds.once(2, param_groups_jobs.taken, name, 2, {})):
        assert got["class"].lower() == "ds_ext." + name.lower().removeprefix("ds_ext.")
        assert len(got["said"]) == (0 if rank else said)
