"""What a step tells reaches HF Trainer's report_to and DeepSpeed's monitors, by their files."""

import csv
import json
import struct
from pathlib import Path

import pytest

from tests import worlds
from tests.integration import trainer_jobs, trainer_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the model."""
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


def wandb(folder):
    """What W&B's offline files hold: by name, all values."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for file in Path(folder).rglob("*.wandb"):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, []).append(json.loads(item.value_json))
    return found


def records(data):
    """The records of a log of LevelDB's format: blocks of 32 KiB, after 7 bytes of W&B's."""
    block, at, parts = 2**15, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no header fits
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


GROUPS = ("AdaLomo", "AdaLomo_no_decay", "mlp")


@pytest.mark.slow
def test_the_callback_reports_to_tensorboard_and_wandb(folder):
    got = worlds.fresh(2, trainer_jobs.reported, folder)[0].result
    assert sorted(got["names"]) == sorted(GROUPS)
    entries = [entry for entry in got["log"] if "loss" in entry]
    assert [entry["step"] for entry in entries] == [2, 4]
    sizes = [f"{kind}_rms/{group}" for kind in ("update", "weight") for group in GROUPS]
    seen, sent = tensorboard(folder), wandb(folder)
    for name in (*sizes, "clip_coefficient", "skipped_parameters", "skipped_steps", "bytes_sent"):
        values = [entry[name] for entry in entries]
        assert [value for _, value in seen[f"train/{name}"]] == pytest.approx(values), name
        assert [step for step, _ in seen[f"train/{name}"]] == [2, 4]
        assert sent[f"train/{name}"] == pytest.approx(values), name
    last = entries[-1]
    assert all(last[name] == got["told"][name] > 0 for name in sizes)
    assert last["bytes_sent"] > 1.5 * got["told"]["bytes_sent"] > 0  # of two steps
    assert last["grad_norm"] == pytest.approx(got["told"]["grad_norm"], rel=1e-6)


@pytest.mark.slow
def test_the_monitors_of_deepspeed_write_the_names_of_groups(folder, tmp_path):
    trainer_runs.model().save_pretrained(tmp_path / "model")
    told = worlds.fresh(2, trainer_jobs.monitored, str(tmp_path))[0].result
    seen, sent = tensorboard(tmp_path), wandb(tmp_path)
    for name in ("update_rms/AdaLomo", "weight_rms/AdaLomo_no_decay", "grad_norm"):
        file = tmp_path / "monitored" / f"Train_Samples_{name.replace('/', '_')}.csv"
        with file.open() as rows:
            values = [float(row[1]) for row in [*csv.reader(rows)][1:]]
        assert values == pytest.approx([told[name]]) and told[name] > 0
        assert [v for _, v in seen[f"Train/Samples/{name}"]] == pytest.approx([told[name]])
        assert sent[f"Train/Samples/{name}"] == pytest.approx([told[name]])
