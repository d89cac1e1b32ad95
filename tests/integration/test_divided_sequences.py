"""accelerate's ``ParallelismConfig(sp_size=2)`` on two real ranks, against one process."""

import pytest
import torch

from tests import worlds
from tests.integration import divided_sequences_jobs


@pytest.mark.slow
@pytest.mark.supports("sequence parallelism (Ulysses)", stage=2, optimizer="LOMO")
def test_sequences_that_accelerate_divides_equal_one_process():
    model = divided_sequences_jobs.make()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rows = divided_sequences_jobs.data()
    ranks = worlds.once(2, divided_sequences_jobs.train)
    # accelerate hands out rows of its own accord: what the two have seen is one after another
    halves = zip(*(rank["seen"] for rank in ranks), strict=True)
    for sequence in (torch.tensor([a + b]) for a, b in halves):
        assert any(torch.equal(sequence[0], row["input_ids"]) for row in rows)
        model.zero_grad()
        model(input_ids=sequence, labels=sequence).loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=divided_sequences_jobs.LR)
    for rank in ranks:
        named = dict(model.named_parameters())
        assert len(rank["seen"]) == len(rows)
        off = torch.cat([(rank["after"][n] - p).flatten() for n, p in named.items()])
        update = torch.cat([(p - before[n]).flatten() for n, p in named.items()])
        assert off.norm() <= 1e-5 * update.norm()
