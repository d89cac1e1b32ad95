"""Step metrics reach HF Trainer's report_to, by TensorBoard's files."""

from pathlib import Path

import pytest

from tests import worlds
from tests.integration import trainer_jobs, trainer_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("reporting")
    trainer_runs.model().save_pretrained(made / "model")
    return str(made)


def tensorboard(folder):
    """The scalars of TensorBoard's files by name: pairs of (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in Path(folder).rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found[name] = [(event.step, event.value) for event in events.Scalars(name)]
    return found


GROUPS = ("AdaLomo", "AdaLomo_no_decay", "mlp")


@pytest.mark.slow
def test_the_callback_reports_to_tensorboard(folder):
    got = worlds.fresh(2, trainer_jobs.reported, folder)[0].result
    assert sorted(got["names"]) == sorted(GROUPS)
    entries = [entry for entry in got["log"] if "loss" in entry]
    assert [entry["step"] for entry in entries] == [2, 4]
    sizes = [f"{kind}_rms/{group}" for kind in ("update", "weight") for group in GROUPS]
    seen = tensorboard(folder)
    for name in (*sizes, "clip_coefficient", "skipped_parameters", "skipped_steps", "bytes_sent"):
        values = [entry[name] for entry in entries]
        assert [value for _, value in seen[f"train/{name}"]] == pytest.approx(values), name
        assert [step for step, _ in seen[f"train/{name}"]] == [2, 4]
    last = entries[-1]
    assert all(last[name] == got["told"][name] > 0 for name in sizes)
    assert last["bytes_sent"] > 1.5 * got["told"]["bytes_sent"] > 0  # of two steps
    assert last["grad_norm"] == pytest.approx(got["told"]["grad_norm"], rel=1e-6)
