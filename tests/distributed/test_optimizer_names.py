"""``"type": "AdamW"`` is DeepSpeed's, ``"ds_ext.AdamW"`` ours; each steps as torch's does."""

import re

import pytest
import torch

from tests import worlds
from tests.common.updates import check_each
from tests.distributed import optimizer_names_jobs

OURS = ["AdamW is ds_ext's, not DeepSpeed's, whose type is \"AdamW\""]


def by_torch(spares_biases):
    """The weights after the job's steps by torch's AdamW in one process."""
    model = optimizer_names_jobs.start()
    decayed = [p for p in model.parameters() if p.dim() > 1 or not spares_biases]
    others = [p for p in model.parameters() if p.dim() == 1 and spares_biases]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=optimizer_names_jobs.LR,
        betas=(0.9, 0.99),
        weight_decay=optimizer_names_jobs.DECAY,
    )
    for step in range(4):
        optimizer.zero_grad()
        optimizer_names_jobs.loss_of(model, step).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["ds_ext.AdamW", "DS_EXT.adamw", "AdamW"])
def test_a_name_that_both_have_is_deepspeeds_without_the_prefix(name, stage):
    ours = name != "AdamW"
    expected = by_torch(spares_biases=ours)
    before = dict(optimizer_names_jobs.start().named_parameters())
    # torch_adam is DeepSpeed's: not its fused one, which it would have to build first
    params = optimizer_names_jobs.ADAMW | ({} if ours else {"torch_adam": True})
    for rank, got in enumerate(worlds.once(2, optimizer_names_jobs.taken, name, stage, params)):
        assert got["class"].startswith("ds_ext.AdamW" if ours else ("torch.", "deepspeed."))
        assert got["said"] == (OURS if ours and not rank else [])
        check_each(got["weights"], expected, before)


@pytest.mark.parametrize("name, said", [("LAMB", 1), ("ds_ext.lamb", 1), ("ds_ext.AdaLomo", 0)])
def test_names_of_ours_take_ours(name, said):
    for rank, got in enumerate(worlds.once(2, optimizer_names_jobs.taken, name, 2, {})):
        assert got["class"].lower() == "ds_ext." + name.lower().removeprefix("ds_ext.")
        assert len(got["said"]) == (0 if rank else said)


@pytest.mark.parametrize(
    "name, message",
    [
        ("ds_ext.AdmW", r"optimizer.type is 'ds_ext.AdmW'.*mean \"AdamW\"\? Known: .*CAME"),
        (
            "AdaLom",
            r"optimizer.type is 'AdaLom', .*torch.optim do not have. Did you mean \"AdaLomo\"\?",
        ),
        ("DS_EXT.foo", r"optimizer.type is 'DS_EXT.foo', which is not a ds_ext optimizer. Known: "),
    ],
)
def test_an_unknown_name_is_refused_on_every_rank(name, message):
    for got in worlds.once(2, optimizer_names_jobs.refused, name):
        assert re.search(message, got), got
