"""HF Trainer on two ranks with the shipped configs, against HF Trainer in one process with the
authors' optimizers; LoRA adapters; accelerate's own loop."""

import functools
import itertools
import math
import tempfile
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import ds_ext
from tests import worlds
from tests.common import authors, by_role, hypers, updates
from tests.common.choose import pairs, params
from tests.common.plain import mean_step, weights
from tests.integration import own_loops, trainer_jobs
from tests.integration.own_loops import LOOPS
from tests.integration.trainer_jobs import BATCH, JOBS, STEPS
from tests.tools.support import of as of_table

OTHER = [name for name, job in JOBS.items() if job.refused or job.half or job.changes]
# What `make test` runs.
QUICK = ["lomo-both-nonreentrant"]
COMPARED = pairs(
    [name for name in JOBS if name not in OTHER],
    lambda name: JOBS[name].settings,
    [*QUICK, "lora-adalomo-stage3", "adalomo-compiled"],
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("trainer")
    trainer_jobs.model().save_pretrained(made / "model")
    return str(made)


def result(folder, name):
    return worlds.once(2, trainer_jobs.train, folder, name)[0]


def build(lora=False, vocab=67):
    model = trainer_jobs.model(vocab)
    return trainer_jobs.adapted(model) if lora else model


def split(model, decay):
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trained if p.ndim >= 2], "weight_decay": decay}
    others = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    return [group for group in (decayed, others) if group["params"]]


CONFIGURED = {"muon": {"adjust_lr_fn": "match_rms_adamw"}}  # by the shipped config


@functools.cache  # runs that differ in accumulation, checkpointing or stage have the same reference
def reference(config, max_norm, lora, streams=(), vocab=67):
    """The same training by HF Trainer in one process, of whole batches -> (weights, log)."""
    job = trainer_jobs.Job(config, {"max_grad_norm": max_norm})
    model = build(lora, vocab)
    groups = split(model, job.all_arguments["weight_decay"])
    # The last name of a tied matrix, which is the head's.
    names = {p: n for n, p in model.named_parameters(remove_duplicate=False)}
    optimizer_of = by_role.optimizer(names, r"_proj\.", dict(streams))
    given = {"lr": job.all_arguments["learning_rate"]} | CONFIGURED.get(config, {})
    optimizer = optimizer_of(config, groups, given)
    with tempfile.TemporaryDirectory() as folder:
        sequential = trainer_jobs.Sequential(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder, per_device_train_batch_size=BATCH, **job.all_arguments
            ),
            train_dataset=trainer_jobs.data(),
            optimizers=(optimizer, None),
        )
        sequential.train()
    return weights(model), sequential.state.log_history


CLOSE = hypers.CLOSE | {"flashadamw": 1e-3}


def compare(got, expected, before, steps, close=1e-5):
    """Compares errors with updates, weight by weight and in all; a frozen weight has none."""
    assert got.keys() == expected.keys()
    updates = torch.stack([(p - before[n]).norm() for n, p in expected.items()])
    errors = torch.stack([(got[n] - p).norm() for n, p in expected.items()])
    resolution = steps * 2**-24 * torch.stack([p.norm() for p in expected.values()])
    allowed = torch.maximum(2 * close * updates, resolution).where(updates > 0, 0)
    assert not [n for n, bad in zip(expected, errors > allowed, strict=True) if bad]
    assert errors.norm() <= close * updates.norm()


ALONE = {"free": {"max_grad_norm": 0.0}, "clipped": {"max_grad_norm": 0.3}}
ALONE["accumulated"] = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}


def alone(case, folder, model, *callbacks):
    told = trainer_jobs.ARGUMENTS | ALONE[case]
    rows = BATCH // told.get("gradient_accumulation_steps", 1)
    return trainer_jobs.Sequential(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=rows, **told
        ),
        train_dataset=trainer_jobs.data(),
        optimizer_cls_and_kwargs=(ds_ext.AdaLomo, {"lr": told["learning_rate"]}),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("case", ALONE)
def test_one_process_without_deepspeed_steps_inside_backward(case, tmp_path):
    """FuseCallback against the authors' AdaLomo in HF Trainer; no gradient is left in ``.grad``."""
    model = build()
    before, left = weights(model), []

    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            left.extend(p for p in model.parameters() if p.grad is not None)

    callbacks = [ds_ext.FuseCallback(), ds_ext.MetricsCallback(), Look()]
    trainer = alone(case, tmp_path, model, *callbacks)
    trainer.train()
    assert max(of(trainer.state.log_history, "update_rms/0")) > 0
    expected, log = reference("adalomo", ALONE[case]["max_grad_norm"], False)
    compare(weights(model), expected, before, STEPS)
    assert of(trainer.state.log_history, "loss") == pytest.approx(of(log, "loss"), rel=1e-4)
    assert not left


@pytest.mark.parametrize("case", params(["clipped", "accumulated"], ["clipped"]))
def test_fused_is_refused_where_trainer_needs_gradients(case, tmp_path):
    trainer = alone(case, tmp_path, build(), ds_ext.FuseCallback(gradient_policy="fused"))
    with pytest.raises(ValueError, match="Set (max_grad_norm=0|gradient_accumulation_steps=1), or"):
        trainer.train()


def of(log, key):
    return [entry[key] for entry in log if key in entry]


@pytest.mark.supports(
    lambda name: "HF Trainer" + (" with LoRA adapters" if JOBS[name].lora else ""), **of_table(JOBS)
)
@pytest.mark.parametrize("name", params(COMPARED, QUICK))
def test_trainer_equals_one_process_and_saves_its_weights(folder, name):
    got, job = result(folder, name), JOBS[name]
    check_saved(got, job.lora, f"{folder}/{name}")
    after, log = reference(job.rule, job.max_norm, job.lora, got["streams"])
    compare(got["after"], after, weights(build(job.lora)), STEPS, CLOSE.get(job.rule, 1e-5))
    assert got["kept"] == 0
    assert got["policy"] == ("fused" if job.accumulation == 1 else "sharded")
    assert of(got["log"], "loss") == pytest.approx(of(log, "loss"), rel=1e-3)
    if transformers.__version__ < "5":  # whose norms and rates are logged at other moments
        return
    assert len(of(log, "grad_norm")) == STEPS
    assert of(got["log"], "grad_norm") == pytest.approx(of(log, "grad_norm"), rel=1e-4)
    if job.max_norm:
        assert min(of(log, "grad_norm")) > 1.05 * job.max_norm  # or it would show nothing
    # under DeepSpeed the Trainer logs the rate of the step to come
    rates = of(got["log"], "learning_rate")
    assert rates[:-1] == pytest.approx(of(log, "learning_rate")[1:])


def check_saved(got, is_lora, folder):
    """What was saved is what was trained: of LoRA the adapters alone, which load."""
    if is_lora:
        before = weights(build(lora=True))
        changed = {n for n in before if not torch.equal(got["after"][n], before[n])}
        assert changed == {n for n in before if "lora_" in n}
        assert got["state"] == len(changed)
        loaded = peft.PeftModel.from_pretrained(trainer_jobs.model(), folder)
        saved = dict(loaded.named_parameters())
    else:
        saved = load_file(f"{folder}/model.safetensors")
        assert saved.keys() == got["after"].keys()
    assert all(torch.equal(p, got["after"][n]) for n, p in saved.items())


@pytest.mark.parametrize("job", [trainer_jobs.unclipped, trainer_jobs.unread])
def test_what_only_trainer_is_told_of_is_warned_of(folder, job):
    worlds.run(2, job, folder)


@pytest.mark.slow
def test_fp16_equals_one_process_but_for_its_rounding(folder):
    got, job = result(folder, "lomo-fp16"), JOBS["lomo-fp16"]
    after, log = reference(job.rule, job.max_norm, job.lora)
    before = weights(build())
    errors = [got["after"][n].float() - p for n, p in after.items()]
    updates = [p - before[n] for n, p in after.items()]
    norm = torch.nn.utils.get_total_norm
    assert norm(errors) <= 0.1 * norm(updates)
    assert got["skipped"] == 0 and got["scale"] == 2**8
    assert of(got["log"], "grad_norm") == pytest.approx(of(log, "grad_norm"), rel=1e-2)
    assert of(got["log"], "loss") == pytest.approx(of(log, "loss"), rel=2e-3)


@pytest.mark.slow
def test_fp16_overflow_skips_steps_and_the_schedule_waits(folder):
    got, expected = result(folder, "lomo-fp16-overflow"), result(folder, "lomo-fp16")
    skipped = got["skipped"]
    assert 0 < skipped < STEPS and got["scale"] == 2 ** (19 - skipped)
    rates, all_rates = (of(r["log"], "learning_rate") for r in (got, expected))
    advanced = [new for old, new in itertools.pairwise([0.0, *rates]) if new != old]
    assert advanced == all_rates[: STEPS - skipped]
    assert all(p.isfinite().all() for p in got["after"].values())
    assert not math.isfinite(of(got["log"], "grad_norm")[0])
    assert math.isfinite(of(got["log"], "grad_norm")[-1])


def test_the_log_tells_the_state_and_the_decay_and_warns_of_nothing(folder):
    got = result(folder, "adalomo")
    for name, decay in got["decays"].items():
        assert decay == (0.0 if "norm" in name else 0.1), name
    (line,) = [line for line in got["said"] if "MiB of state" in line]
    assert line.startswith("AdaLomo, ZeRO stage 3, 2 ranks: 18,048 parameters trained, ")
    said = "\n".join(got["said"])
    assert "start at zero" not in said and "is small for" not in said
    assert "model.layers.*.self_attn.q_proj.weight (2)" in said
    assert "no weight decay on: model.layers.*.input_layernorm.weight (2)" in said


def test_a_scheduler_that_deepspeed_would_give_no_metric_is_refused(folder):
    with pytest.raises(AssertionError, match="choose another lr_scheduler_type"):
        result(folder, "plateau")


@pytest.mark.slow
def test_arguments_that_name_another_optimizer_are_refused(folder):
    worlds.run(2, trainer_jobs.ignored, folder)


def test_an_optimizer_that_trainer_would_drop_is_refused(folder):
    worlds.run(2, trainer_jobs.dropped, folder)


def check_loop(got, loop):
    """Checks a loop on ranks against the authors' code in one process -> that one's norms."""
    model = build()
    optimizer = authors.ordinary(loop.rule, split(model, 0.0), {"lr": loop.lr})
    norms, rates = own_loops.accelerated_reference(loop, model, optimizer)
    compare(got["after"], weights(model), weights(build()), len(norms))
    assert got["norms"] == pytest.approx(norms, rel=1e-4)
    assert got["rates"] == pytest.approx(rates)
    return norms


@pytest.mark.supports("accelerate, your own loop", **of_table(LOOPS))
@pytest.mark.parametrize("name", params(LOOPS, ["lomo-both"]))
def test_accelerate_loop_equals_one_process(folder, name):
    loop = LOOPS[name]
    norms = check_loop(worlds.once(2, own_loops.accelerate, folder, name)[0], loop)
    assert min(norms) > 1.2 * loop.max_norm


# What each rank asks accelerate for, the config beside that, and what is told.
COUNTED = {
    "none": ((None, None), {}, ()),
    "both for the CPU": (("cpu", "cpu"), {}, ()),
    "neither for the CPU": (
        ("", ""),
        {"zero_optimization": {"stage": 3}},
        ("accelerate counts 1 process,", "2 data-parallel ranks", "PartialState(cpu=True)"),
    ),
    "without ZeRO": (("", ""), {}, ("the same data", "PartialState(cpu=True)")),
    "one rank alone": ((None, ""), {}, ("accelerate counts 1 process,", "rank 1")),
}


@pytest.mark.parametrize("name", COUNTED)
def test_ranks_that_accelerate_would_give_the_same_data_are_refused(name):
    counts, config, parts = COUNTED[name]
    for told in worlds.run(2, own_loops.same_data, counts, config):
        assert bool(told) == bool(parts) and all(part in told for part in parts), told


# Blocks of 4-bit weights have 64 elements, and no row may be shorter.
WIDE = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


@pytest.mark.parametrize("stage", params([(None,), (0,), (1,), (2,)], [(None,), (2,)]))
def test_adapters_of_a_base_in_4_bits_are_trained_as_by_torch(tmp_path, stage):
    """QLoRA, whose base bitsandbytes packs in the first forward pass on a CPU."""
    pytest.importorskip("bitsandbytes", minversion="0.50")
    config = transformers.LlamaConfig(**WIDE, num_attention_heads=4)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = own_loops.quantized(str(tmp_path))
    before = weights(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **own_loops.QLORA)
    for batches in zip(*map(own_loops.qlora_data, range(2)), strict=True):
        mean_step(optimizer, [model(input_ids=rows, labels=rows).loss for rows in batches])
    after, names = weights(model), {n for n, p in model.named_parameters() if p.requires_grad}
    for got in worlds.run(2, own_loops.qlora, str(tmp_path), stage):
        assert all(torch.equal(got[n], p) for n, p in after.items() if n not in names)
        of_adapters = ({n: x[n].float() for n in names} for x in (got, after, before))
        assert updates.error(*of_adapters) <= 1e-5


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
