"""A wrong config ends all ranks of a script at once, with an error that names the key."""

import pytest

from tests import worlds
from tests.distributed import wrong_configs_jobs
from tests.distributed.wrong_configs_jobs import WRONG


def test_a_wrong_config_is_named_on_all_ranks():
    for rank, shown in enumerate(worlds.run(2, wrong_configs_jobs.shown)):
        for words, text in zip(WRONG, shown, strict=True):
            (line,) = [line for line in text.splitlines() if "ValueError: " in line]
            assert line.startswith(f"[rank{rank}]: ValueError: ") and words in line, text


def test_groups_that_do_not_divide_the_ranks_are_refused_on_all_ranks():
    for told in worlds.run(3, wrong_configs_jobs.undivided):
        assert "zero_hpz_partition_size = 2 does not divide the 3 ranks" in told


FROZEN = "ValueError: AdaLomo: all its parameters have requires_grad=False"
BESIDE = 'optimizer.type "AdaLomo" in the config has no effect, because the program passes'
FUNCTION = "ValueError: deepspeed.initialize: the optimizer is a function"
PARTITIONED = "ValueError: fuse_into_backward: ZeRO-3 has partitioned this model,"
MISTAKES = {  # the error; or "" and the one warning
    "frozen": (FROZEN, ""),
    "fused_frozen": (FROZEN, ""),
    "second": ("RuntimeError: AdamW.step() found no gradients: an engine", ""),
    "own_step": ("", ""),
    "beside_the_type": ("", f"{BESIDE} AdamW to deepspeed.initialize"),
    "own_beside_the_type": ("", f"{BESIDE} Lion to deepspeed.initialize"),
    "function": (FUNCTION, ""),
    "function_with_section": (FUNCTION, ""),
    "fused_at_stage_3": (f"{PARTITIONED} and its engine steps inside backward already: rem", ""),
    "fused_after_an_engine": (f"{PARTITIONED} which only a DeepSpeed engine can train", ""),
    "wrong_value": ("ValueError: gradient_clipping is '1.0'; allowed: a number >= 0.", ""),
    "compiled": ("ValueError: zero_optimization.stage = 3 cannot partition what torch.compile", ""),
    "compiled_backward": ("ValueError: engine.compile(compiled_autograd_enabled=True)", ""),
    "wrapped": ("ValueError: the model is wrapped by DistributedDataParallel: pass the model", ""),
    "shared_memory": ("ValueError: parameters share memory with each other", ""),
    "no_optimizer": (
        'ValueError: deepspeed.initialize: the config has a section "ds_ext", but no optimizer',
        "",
    ),
    "auto_sizes": ('ValueError: train_batch_size is "auto", which is filled in by HF', ""),
    "auto_clipping": ('ValueError: gradient_clipping is "auto", which is filled in by HF', ""),
    "no_type": ("", ""),  # an engine that is not ours
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_a_program_is_named_at_once(name):
    (told,) = worlds.once(1, wrong_configs_jobs.mistakes)
    assert told.keys() == MISTAKES.keys()
    error, warning = MISTAKES[name]
    assert told[name].error.startswith(error) and bool(told[name].error) == bool(error)
    assert sum(line.startswith(warning) for line in told[name].log) == 1 or not warning
    assert not any("optimizer.type" in line for line in told["no_type"].log)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_the_ranks_are_summed_or_averaged(stage):
    """LOMO steps by lr times the gradient, which is the sum of a rank's inputs: 2 and 4."""
    for op, gradient in (("sum", 6.0), ("mean", 3.0)):
        for before, after in worlds.run(2, wrong_configs_jobs.summed, stage, op):
            assert (before - after - 0.5 * gradient).abs().max() < 1e-5
