"""LoRA: half of its adapters start at zero. AdamW learns them beside AdaLomo, which would not."""

import pytest
import torch

import ds_ext
from tests.integration import trainer_runs

STEPS = 60


def losses(optimizer_of) -> list[float]:
    model = trainer_runs.adapted(trainer_runs.model())
    optimizer = optimizer_of(model)
    rows = torch.stack([row["input_ids"] for row in trainer_runs.data()[:4]])
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def test_a_mixture_by_name_learns_adapters_as_adamw_does():
    entries = [{"match": "lora_", "type": "AdamW", "lr": 1e-2}]
    expected = losses(lambda model: torch.optim.AdamW(trained(model), lr=1e-2, weight_decay=0.0))
    for kind in (ds_ext.AdaLomo, ds_ext.LAMB):
        alone = losses(lambda model, kind=kind: kind(trained(model), lr=5e-4))
        mixed = losses(lambda model, kind=kind: kind.for_model(model, param_groups=entries))
        assert mixed == pytest.approx(expected, rel=1e-4)
        assert alone[0] - alone[-1] < 0.01 * (mixed[0] - mixed[-1])
