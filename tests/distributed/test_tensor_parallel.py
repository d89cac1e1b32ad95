"""DeepSpeed's AutoTP and Ulysses on four real ranks, two by two, against one process."""

import pytest
from deepspeed.checkpoint import constants

from ds_ext.engine import autotp
from tests import worlds
from tests.common import hypers
from tests.common.choose import pairs, params
from tests.distributed import tensor_parallel_jobs, ulysses_jobs
from tests.distributed.tensor_parallel_jobs import CASES
from tests.tools.support import of

# FlashAdamW steps the output head beside SinkGD, and its codes of 8 bits jump.
CLOSE = hypers.CLOSE | {"sinkgd": 1e-4}
# What `make test` runs: each way of dividing, at one stage or another.
QUICK = [
    *("llama-came-1", "llama-muon-3", "bert-adafactor-1", "fused-0", "tied-1"),
    "sequences-lomo-1",
]
# Without data parallelism: each stage, with clipping, and with accumulation.
ALONE = ["llama-came-0", "clip-1", "llama-came-2", "accumulate-3", "clip-muon-3"]


def _feature(name):
    if name.startswith("sequences"):
        return "sequence parallelism (Ulysses)"
    more = name.startswith(("clip", "accumulate", "resume"))
    return "tensor parallelism" + (": clipping, accumulation, resume" if more else " (AutoTP)")


# A rule does not know how its matrices are divided: each by each model, wherever; then the ways.
RULES = pairs(CASES, lambda name: (_feature(name), CASES[name].model, CASES[name].rule), QUICK)
CHOSEN = pairs(CASES, lambda name: (_feature(name), *CASES[name].settings), RULES)


@pytest.mark.supports(_feature, **of(CASES))
@pytest.mark.parametrize("name", params(CHOSEN, QUICK))
def test_four_ranks_equal_one_process(name):
    compare(name, 4)


@pytest.mark.parametrize("name", params(ALONE, ["llama-came-2", "clip-1"]))
def test_two_ranks_without_data_parallelism_equal_one_process(name):
    compare(name, 2)


def compare(name, ranks):
    case, result = CASES[name], worlds.once(ranks, tensor_parallel_jobs.error, name)[0]
    assert result["alike"]  # replicated parameters on all ranks, others where the same is held
    assert len(result["time limits"]) == 1  # the forward pass waits for lost ranks no longer
    if not case.dropout:
        close = CLOSE.get(case.rule, 1e-5)
        assert result["error"] <= close, result
        is_exact = case.model != "sequences"
        norms = result["expected norms"]
        assert result["norms"] == pytest.approx(norms, rel=close if is_exact else 1e-4)
        assert is_exact or min(norms) > 1.2 * case.max_norm  # or clipping would show nothing


def test_the_cases_divide_unevenly_and_in_every_way():
    """Rows, columns, a fused matrix, biases of both kinds, a vocabulary."""
    boxes = {}
    for name in ("llama-came-1", "bert-adafactor-1", "fused-0", "tied-1"):
        boxes |= worlds.once(4, tensor_parallel_jobs.error, name)[0]["held"]
    sizes = {n: [sum(b.numel for b in part) for part in parts] for n, parts in boxes.items()}
    assert any(a != b for a, b in sizes.values())
    assert any(len(part) > 1 for parts in boxes.values() for part in parts)
    names = "".join(sizes)
    for part in ("o_proj", "q_proj", "lm_head", "embed_tokens", "query.bias", "gate_up.bias"):
        assert part in names


class Described:
    """A parameter whose layer says what it is given."""

    def __init__(self, meta):
        setattr(self, constants.DS_AUTOTP_UC_META, meta)
        self.tensor_model_parallel = True


UNSUPPORTED = {"conversion": {"replicated": False, "unsupported_reason": "it is a convolution"}}
UNSUPPORTED |= {"logical_shape": (4, 4), "partition_sizes": None, "partition_dim": 0}
WHY = [(None, "its layer has no description of the split"), (UNSUPPORTED, "it is a convolution")]


@pytest.mark.parametrize("meta, why", WHY)
def test_what_is_not_known_to_be_divided_how_is_refused(meta, why):
    with pytest.raises(ValueError, match=f"autotp_size: .* conv.weight .*{why}"):
        autotp.tensor_parallel_shards({Described(meta): "conv.weight"}, 0, 2, None)


@pytest.mark.parametrize("how", ["columns of parts", "shared", "scaled"])
def test_pieces_that_are_no_boxes_are_refused(how):
    from deepspeed.checkpoint import affine

    made = {
        "columns of parts": lambda: affine.sub_param_map((4, 8), [4, 4], [[2, 2], [2, 2]], 1),
        "shared": lambda: affine.segmented_map((6, 4), [(4, False), (2, True)], 0, 2, [[2, 2]]),
        "scaled": lambda: affine.replicated_map((4,), 2, scale=0.5),
    }[how]()
    meta = {"conversion": {"replicated": False, "affine_map": made.to_dict()}}
    with pytest.raises(ValueError, match="partition_config"):
        autotp.tensor_parallel_shards({Described(meta): "w"}, 0, 2, None)


def test_a_gradient_that_is_not_finite_on_one_rank_of_a_sequence_is_skipped_on_all():
    worlds.run(4, ulysses_jobs.not_finite)


def test_sizes_and_groups_of_sequences_that_do_not_fit_are_refused_on_every_rank():
    worlds.run(4, ulysses_jobs.refusals)
