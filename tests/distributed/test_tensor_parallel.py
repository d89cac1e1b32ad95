"""DeepSpeed's AutoTP on four real ranks, two by two, against one process with whole matrices."""

import re
from pathlib import Path

import pytest
import torch

from ds_ext.engine import autotp
from tests.common import apart
from tests.distributed.tensor_worker import CASES
from tests.support import of

pytestmark = pytest.mark.slow
EXACT = 1e-5  # of the update of the whole model


ALONE = "(llama-came|accumulate|clip)-"


def run(ranks: int, chosen: str, out: Path):
    """The results of the worker's cases on real ranks."""
    apart.python(*apart.ranks(ranks), "-m", "tests.distributed.tensor_worker", str(out), chosen)
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(4, "", tmp_path_factory.mktemp("tensor") / "found.pt")


@pytest.fixture(scope="module")
def found_alone(tmp_path_factory):
    return run(2, ALONE, tmp_path_factory.mktemp("tensor") / "alone.pt")


def _feature(name):
    more = name.startswith(("clip", "accumulate", "resume"))
    return "tensor parallelism" + (": clipping, accumulation, resume" if more else " (AutoTP)")


@pytest.mark.supports(_feature, **of(CASES))
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_equal_one_process(found, name):
    result = found[name]
    assert isinstance(result, dict), result
    assert result["alike"]  # replicated parameters on all ranks, the others on their twins
    if not CASES[name].dropout:
        assert result["error"] <= EXACT, result
        assert result["norm"] == pytest.approx(result["expected norm"], rel=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if re.match(ALONE, name)])
def test_two_ranks_without_data_parallelism_equal_one_process(found_alone, name):
    result = found_alone[name]
    assert isinstance(result, dict), result
    assert result["alike"]
    assert result["error"] <= EXACT, result
    assert result["norm"] == pytest.approx(result["expected norm"], rel=1e-5)


def test_the_cases_divide_unevenly_and_in_every_way(found):
    """Rows, columns, a fused matrix, biases of both kinds, a vocabulary."""
    boxes = found["held"]
    sizes = {n: [sum(b.numel for b in part) for part in parts] for n, parts in boxes.items()}
    assert any(a != b for a, b in sizes.values())
    assert any(len(part) > 1 for parts in boxes.values() for part in parts)
    names = "".join(sizes)
    for part in ("o_proj", "q_proj", "lm_head", "embed_tokens", "query.bias", "gate_up.bias"):
        assert part in names


class Described:
    """A parameter whose layer says what it is given."""

    def __init__(self, meta):
        setattr(self, autotp.DS_AUTOTP_UC_META, meta)
        self.tensor_model_parallel = True


@pytest.mark.parametrize(
    "meta, why",
    [
        (None, "its layer does not say how"),
        (
            {
                "conversion": {"replicated": False, "unsupported_reason": "it is a convolution"},
                "logical_shape": (4, 4),
                "partition_sizes": None,
                "partition_dim": 0,
            },
            "it is a convolution",
        ),
    ],
)
def test_what_is_not_known_to_be_divided_how_is_refused(meta, why):
    with pytest.raises(ValueError, match=f"autotp_size: conv.weight .*{why}"):
        autotp.held({Described(meta): "conv.weight"}, 0, 2)


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
        autotp.held({Described(meta): "w"}, 0, 2)
