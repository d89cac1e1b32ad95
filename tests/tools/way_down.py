"""The steps of ``plan --fit`` on a small Llama: bytes that are planned, and those of real training.

    python -m tests.tools.way_down  # writes the table of docs/performance-method.md anew

Each step's config trains two steps under ``deepspeed.initialize``, on one rank, on a pretended
device (pretend.py) that holds buckets as long as a GPU's streams do. The peak of the second step is
compared. Not counted on either side: weights that ZeRO-3 copies for computing and the table of
random bits. Matrix products of bf16 are computed in fp32. Limits that are sizes of real models
(buckets, chunks of logits, blocks in which torch's operations step a run) are smaller here.
"""

import contextlib
import gc
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
import transformers
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ext.commands import config
from ds_ext.commands.cli import main
from ds_ext.forward import chunked_loss
from ds_ext.ops import block_sizes, rounding
from ds_ext.planner import fit, options
from ds_ext.planner.table import aligned
from tests import worlds
from tests.common import pretend, streams
from tests.tools import blocks

PAGE = Path(__file__).parents[2] / "docs/performance-method.md"
MIB = 2**20
SIZES: dict[str, Any] = dict(
    vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
BUCKET, SMALL, CHUNK = 2**22, 2**18, 2**17  # elements
WAYS = {  # the options of each run of ``plan --fit``; together they take every step
    "4 rows of 128 tokens": "--batch 4 --seq 128 --memory 14",
    "4 rows, FlashAdamW": "--batch 4 --seq 128 --memory 40 --optimizer flashadamw",
    "1 row of 512 tokens": "--batch 1 --seq 512 --memory 75",
}


class Fp32Products(TorchDispatchMode):
    """Computes matrix products of bf16 in fp32, and rounds them to bf16.

    A CPU without instructions for bf16 takes about 40 times as long for a product in bf16 whose
    matrices are both contiguous. A mode that is entered later does not see the copies in fp32.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # and does not import it, for seconds

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        product = f.overloadpacket
        if product not in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            return f(*args, **kwargs)
        if args[0].dtype != torch.bfloat16:
            return f(*args, **kwargs)
        out = kwargs.pop("out", None)
        made = product(*(x.float() for x in args), **kwargs)
        return made.bfloat16() if out is None else out.copy_(made)


class Step(NamedTuple):
    name: str
    planned: int  # bytes
    measured: int  # bytes
    losses: list[float]  # of the two training steps
    config: dict[str, Any]  # that trained


def way(name: str) -> list[Step]:
    """The steps of one of ``WAYS``, measured; a job of one rank."""
    with tempfile.TemporaryDirectory() as folder, small_limits():
        model = transformers.LlamaConfig(**SIZES)
        model.save_pretrained(folder)
        written = Path(folder) / "ds.json"
        given = WAYS[name].split()
        card = given.index("--memory") + 1
        given[card] = str(float(given[card]) / 1024)  # GiB
        inner, found = fit.cheapest_reductions, []
        with mock.patch.object(
            fit, "cheapest_reductions", lambda *a: found.append(inner(*a)) or found[0]
        ):
            assert main(["plan", "--model", folder, *given, "--fit", str(written)]) == 0
        steps = []
        for taken in found[0][1]:
            path = written
            if taken is not found[0][1][-1]:
                path = Path(folder) / "step.json"
                path.write_text(json.dumps(config.of_plan(taken.options)))
            assert taken.options.batch is not None
            shape = (taken.options.batch.rows, taken.options.batch.tokens)
            measured, losses = trained(path, model, shape)
            used = json.loads(path.read_text())
            steps.append(Step(taken.step.name, round(taken.use.total), measured, losses, used))
        return steps


def trained(path: Path, model: Any, shape: tuple[int, int]) -> tuple[int, list[float]]:
    """Trains two steps with a config -> the peak bytes of the second one, and both losses."""
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        with memory.uncounted():
            return fetch(*args, **kwargs)

    with (
        streams.buckets_held(),
        Fp32Products(),
        pretend.device() as memory,
        mock.patch.object(PartitionedParameterCoordinator, "fetch_sub_module", uncounted),
    ):
        with memory.uncounted():
            rounding.noise_table(pretend.DEVICE)
        torch.manual_seed(0)
        llama = transformers.LlamaForCausalLM(model).train()
        engine = deepspeed.initialize(model=llama, config=str(path))[0]
        tokens = torch.randint(0, model.vocab_size, shape).to(engine.device)
        losses = []
        for _ in range(2):
            gc.collect()
            memory.peak = memory.bound = memory.alive()
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            del loss
        peak = memory.peak
        engine.destroy()
    return peak, losses


@contextlib.contextmanager
def small_limits() -> Iterator[None]:
    """Limits in the proportion of the small model."""
    with (
        mock.patch.object(options, "gpu_bucket_size", lambda *_: BUCKET),
        mock.patch.object(block_sizes, "product_limit", lambda _: 2**14),
        mock.patch.object(fit, "BUCKET_SIZE", SMALL),
        mock.patch.object(chunked_loss, "CHUNK_LOGITS", CHUNK),
    ):
        yield


def table(ways: dict[str, list[Step]]) -> str:
    """The table of docs/performance-method.md."""
    rows = [["", "plan", "measured"]]
    for name, steps in ways.items():
        for step in steps:
            label = f"{step.name} ({name})" if step is steps[0] else step.name
            rows.append([label, f"{step.planned / MIB:.2f}", f"{step.measured / MIB:.2f}"])
    return "\n".join(["```text", *aligned(rows), "```"])


def shown(name: str) -> list[tuple[str, float, float]]:
    """The rows of docs/performance-method.md from the first one of a way on."""
    rows = [line.rsplit(maxsplit=2) for line in blocks.read(PAGE, "steps").splitlines()[2:-1]]
    first = next(i for i, row in enumerate(rows) if row[0].endswith(f"({name})"))
    return [(row[0].partition(" (")[0], *map(float, row[1:])) for row in rows[first:]]


if __name__ == "__main__":
    made = table({name: worlds.once(1, way, name, limit=600)[0] for name in WAYS})
    blocks.write(PAGE, "steps", made)
    print(made)
