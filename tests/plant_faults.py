"""Whether the tests still find faults: each of ``FAULTS`` is planted in a copy of the tree.

    python -m tests.plant_faults             # all, against the tests that should see each
    python -m tests.plant_faults came zero   # those whose place or line contains one of the words
    python -m tests.plant_faults --all       # all, against the whole of `make test`

Only tests of `make test` are run, those that are not marked slow. The tests named beside a fault
must pass without it; if one of them then fails, the fault is seen. Ends with status 1 if a fault
is not seen. A fault whose line has been changed since is an error: plant another in its place.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIMIT = 900  # seconds that a run of tests takes at most: a hang is seen too


class Fault(NamedTuple):
    """One line of a file, what it is turned into, and the tests that should see it."""

    file: str  # below ds_ext
    line: str
    wrong: str
    tests: str  # what pytest is given: files below tests, and -k


ZERO = "distributed/test_zero.py -k "
FSDP2 = "integration/test_fsdp2_trainer.py -k "
FAULTS = (
    # groups of ranks that hold copies
    Fault(
        "distributed/placement.py",
        "if size_of(self.replicas) == 1:",
        "if size_of(self.replicas) >= 1:",
        "distributed/test_copies.py -k 'one_process and 4-adalomo'",
    ),
    Fault(
        "engine/replica_groups.py",
        "if shards in _of_shards:",
        "if not shards:",
        "distributed/test_copies.py -k built",
    ),
    Fault(
        "engine/own_engine.py",
        "return super().is_first_weights_partition_group() and not",
        "return super().is_first_weights_partition_group() or not",
        "distributed/test_copies.py -k checkpoint",
    ),
    # FSDP2: segments called again, tied weights, what HF Trainer and accelerate ask for
    Fault(
        "distributed/fully_shard.py",
        "state._training_state = type(state._training_state).IDLE",
        "pass",
        "distributed/test_fully_shard.py -k came-reentrant",
    ),
    Fault(
        "distributed/fully_shard.py",
        "owners = {_in_place(own): own._module_info.module",
        "owners = {own.sharded_param: own._module_info.module",
        FSDP2 + "'one_process and adalomo'",
    ),
    Fault(
        "distributed/fully_shard.py",
        "if other != name and is_padded:",
        "if False:",
        FSDP2 + "refused",
    ),
    Fault(
        "backward/fuse.py",
        "if layout.has_kept():",
        "if False:",
        "distributed/test_fully_shard.py -k too_late",
    ),
    Fault(
        "backward/torch_calls.py",
        "is_same = max_norm == math.inf or 0 < max_norm == by.grad_config.max_norm",
        "is_same = True",
        "unit/test_training_loops.py -k tells_the_norm",
    ),
    Fault(
        "backward/torch_calls.py",
        "and trained.issubset(params)):",
        "and trained):",
        "unit/test_training_loops.py -k tells_the_norm",
    ),
    Fault(
        "hf.py",
        "max_grad_norm=args.max_grad_norm or 0.0,",
        "max_grad_norm=0.0,",
        FSDP2 + "lomo-default",
    ),
    Fault(
        "optimizer/dtensor_state.py",
        "found[key] = held.reshape(part.shape) if held.numel() == n else held",
        "found[key] = held.reshape(part.shape) * 1.01",
        FSDP2 + "resumed",
    ),
    Fault(
        "planner/fsdp2.py",
        "return sum(-(-shape[0] // ranks) * math.prod(shape[1:])",
        "return sum(shape[0] // ranks * math.prod(shape[1:])",
        "integration/test_cli.py -k fsdp2",
    ),
    # optimizer: gradients that the first round of a step judges
    Fault(
        "ops/executors/triton/kernels/run.py",
        "if tl.load(pointer(t, FOUND, tl.float32)) <= number(t, MOST):",
        "if tl.load(pointer(t, FOUND, tl.float32)) == tl.load(pointer(t, FOUND, tl.float32)):",
        "unit/test_device_nonfinite.py -k come",
    ),
    Fault(
        "optimizer/bucket_optimizer.py",
        "self._plans.drop_weight_norms(params)",
        "pass",
        "unit/test_device_nonfinite.py -k come",
    ),
    Fault(
        "optimizer/nonfinite.py",
        "good = found.numpy() <= step.upper_bounds()",
        "good = own.numpy() <= step.upper_bounds()",
        "unit/test_nonfinite.py -k had_not_come",
    ),
    Fault(
        "rules/scale.py",
        "return not self.momentum and (",
        "return (",
        "unit/test_nonfinite.py -k comes_first",
    ),
    Fault(
        "optimizer/bucket_step.py",
        'state["step"] -= 1',
        'state["step"] -= 0',
        "unit/test_nonfinite.py -k had_not_come",
    ),
    Fault(
        "backward/step_state.py",
        "is_bad = (totals <= self.reader.upper_bounds()).logical_not_()",
        "is_bad = totals < 0",
        "unit/test_fuse.py -k skipped_whole",
    ),
    # stages of a pipeline
    Fault(
        "distributed/pipeline_layout.py",
        "            dist.all_reduce(own, group=group)\n",
        "            pass\n",
        "distributed/test_pipelines.py -k adalomo-2-2-1",
    ),
    Fault(
        "engine/pipeline.py",
        "made.num_replicas *= stages",
        "made.num_replicas *= 1",
        "distributed/test_pipelines.py -k adalomo-2-2-1",
    ),
    # ops: passes over memory
    Fault(
        "ops/shard.py",
        "return (square_sum / max(1, self.numel)) ** 0.5",
        "return (square_sum / max(1, len(self))) ** 0.5",
        "unit/test_rules.py -k 'equals or padding'",
    ),
    Fault(
        "ops/rounding.py",
        "+ step * schema.PRIME2) % 2**32",
        "+ schema.PRIME2) % 2**32",
        "unit/test_precision.py",
    ),
    Fault(
        "ops/weight_storage.py",
        "upper = torch.add(bits, 0x8000,",
        "upper = torch.add(bits, 0x0000,",
        "unit/test_precision.py",
    ),
    Fault(
        "ops/executors/reference.py",
        "u, weight_decay, lr = times(u, lr), lr * weight_decay, 1.0",
        "u, weight_decay, lr = times(u, lr), weight_decay, 1.0",
        "unit/test_rules.py",
    ),
    Fault(
        "ops/quantize.py",
        "absmax.copy_(quant_state.absmax)",
        "absmax.copy_(quant_state.absmax.max())",
        "unit/test_galore.py -k 8",
    ),
    Fault(
        "ops/executors/native/passes.cpp",
        "h = (h ^ (h >> 7)) * NOISE1 & 0xFFFFu;",
        "h = (h ^ (h >> 7)) * (NOISE1 + 2) & 0xFFFFu;",
        "unit/test_native.py -k every_number",
    ),
    Fault(
        "ops/executors/native/passes.cpp",
        "if (probed(call, e, false)) continue;",
        "if (true) continue;",
        "unit/test_native.py -k edited",
    ),
    Fault(
        "ops/batch.py",
        "self.own_row_firsts = self.row_firsts + row_skips",
        "self.own_row_firsts = self.row_firsts",
        "unit/test_split.py unit/test_native.py",
    ),
    Fault(
        "optimizer/plans.py",
        "or len(steps) != 1:",
        "or len(steps) < 1:",
        "unit/test_native.py unit/test_optimizer.py",
    ),
    Fault(
        "ops/executors/reference.py",
        "sums[b.mats] += square.mul_(new.square()",
        "sums[b.mats] += square.mul_(new",
        "unit/test_normalized.py -k sharded",
    ),
    Fault(
        "ops/executors/table_batch.py",
        "layout is None or layout.dtype not in dtypes",
        "layout is None",
        "unit/test_unseen_rule.py -k 'native and bf16 and (lerp_from or sign)'",
    ),
    Fault(
        "ops/scratch.py",
        "kind.used = begin.get(key, 0)",
        "kind.used = 0",
        "unit/test_unseen_rule.py -k may_run",
    ),
    Fault(
        "ops/executors/reference.py",
        "clamp_(max=LARGEST).masked_fill_(v == 0, 0)",
        "clamp_(max=LARGEST)",
        "unit/test_every_rule.py -k 'smallest_eps and ops and adalomo'",
    ),
    # rules: the formulas
    Fault(
        "rules/adalomo.py",
        "shard.rms(p_sq).clamp(min=eps2)",
        "shard.rms(p_sq).clamp(min=0)",
        "unit/test_rules.py -k adalomo",
    ),
    Fault(
        "rules/came.py",
        "sums, eps2, beta3, shard)",
        "sums, eps2, beta2, shard)",
        "unit/test_rules.py -k came",
    ),
    Fault(
        "rules/factored.py",
        "(clip / shard.rms(u_sq)).clamp(max=1)",
        "(clip / shard.rms(u_sq)).clamp(min=1)",
        "unit/test_rules.py",
    ),
    Fault(
        "rules/lamb.py",
        "ratio = ratio.where((p_sq > 0) & (u_sq > 0), 1.0)",
        "ratio = ratio.where(p_sq >= 0, 1.0)",
        "unit/test_lamb.py",
    ),
    Fault(
        "rules/galore.py",
        "if (t - 1) % self.update_proj_gap == 0:",
        "if t % self.update_proj_gap == 0 or t == 1:",
        "unit/test_galore.py",
    ),
    # distributed: where parameters lie, and what ranks tell each other
    Fault(
        "distributed/placement.py",
        "if communicates(self.statistics_group):",
        "if size_of(self.statistics_group) > 2:",
        ZERO + "stage1",
    ),
    Fault(
        "distributed/placement.py",
        "return flat.view(self.num_shards, -1)[self.shard_index]",
        "return flat.view(self.num_shards, -1)[0]",
        ZERO + "stage1",
    ),
    Fault(
        "distributed/placement.py",
        "if len(whole) > len(values):",
        "if len(whole) < len(values):",
        ZERO + "stage1",
    ),
    Fault(
        "distributed/layout.py",
        "counts[1, own] = more.int()",
        "counts[1, own] = 0",
        ZERO + "reentrant",
    ),
    Fault(
        "distributed/layout.py",
        "is_ready = found >= (1 if all_ended else self.world)",
        "is_ready = found >= 1",
        "distributed/test_order.py",
    ),
    Fault(
        "distributed/desync.py",
        "        if are_alike():\n            return",
        "        are_alike()\n        return",
        "distributed/test_order.py",
    ),
    Fault(
        "distributed/consensus.py",
        "if len(set(gathered(digest, group))) == 1:",
        "if digest:",
        "distributed/test_faults.py -k differ",
    ),
    # backward: gradients on their way
    Fault(
        "backward/reduction.py",
        "(found > nonfinite.MAX_GOOD_VOTES).unbind()",
        "(found > 8 * nonfinite.MAX_GOOD_VOTES).unbind()",
        ZERO + "not_finite",
    ),
    Fault(
        "backward/buckets.py",
        "return flat.clone()",
        "return flat",
        ZERO + "'2- and authors'",
    ),
    Fault(
        "backward/buckets.py",
        "own = before if own is None else before + own",
        "own = before if own is None else own",
        ZERO + "reentrant",
    ),
    Fault(
        "optimizer/nonfinite.py",
        "sums = next(rule) if step.sums_first else ()",
        "sums = next(rule, ())",
        "unit/test_nonfinite.py -k had_not_come",
    ),
    Fault(
        "optimizer/nonfinite.py",
        "begins_checked = by_sums and not step.sums_first",
        "begins_checked = False",
        "unit/test_device_nonfinite.py -k had_not_come",
    ),
    Fault(
        "backward/receivers.py",
        "        if not self.state.overflow:\n            self.stepper",
        "        if True:\n            self.stepper",
        "distributed/test_scaling.py",
    ),
    Fault(
        "backward/receivers.py",
        "factor = state.reader.unscale(placement) * state.coefficient",
        "factor = state.reader.unscale(placement)",
        "distributed/test_training.py -k clip-stage3",
    ),
    Fault(
        "backward/fused_backward.py",
        "self.norm = norm = state.norm\n        if math.isfinite(norm):",
        "self.norm = norm = state.norm\n        if self.clipping.previous_norm is None:",
        "distributed/test_training.py -k previous",
    ),
    # checkpoint: the format, and who reads what
    Fault(
        "checkpoint/resharding.py",
        'optimizer.state[param] = {**state, "step": found["step"]}',
        'optimizer.state[param] = {**state, "step": 1}',
        "distributed/test_resume.py -k bit_for_bit",
    ),
    Fault(
        "checkpoint/pieces.py",
        "values[at - part.start : stop - part.start] = flat[at - first : stop - first]",
        "values[at - part.start : stop - part.start] = flat[: stop - at]",
        "distributed/test_resume.py -k another",
    ),
    Fault(
        "checkpoint/folder.py",
        'damaged = said.pop("crc32") != _checksum(said)',
        'damaged = said.pop("crc32") == -1',
        "unit/test_fuzz.py -k manifest",
    ),
    # engine: what stands between DeepSpeed and the optimizers
    Fault(
        "engine/adapter.py",
        "        self.layout.end_step()\n        self._write_events()",
        "        self._write_events()",
        ZERO + "'2- and came'",
    ),
    Fault(
        "engine/adapter.py",
        "self.loss_scaler.update_scale(result.overflow)",
        "self.loss_scaler.update_scale(False)",
        "distributed/test_scaling.py",
    ),
    Fault(
        "engine/zero3.py",
        "for param in self.updated:",
        "for param in ():",
        "distributed/test_refusals.py -k stale",
    ),
    Fault(
        "engine/layouts.py",
        "return size_of(group) // size",
        "return size_of(group)",
        "distributed/test_ulysses.py",
    ),
    Fault(
        "engine/layouts.py",
        "return kind(own, grad_divisor)",
        "return kind(own)",
        "distributed/test_expert_parallel.py",
    ),
    Fault(
        "engine/expert_parallel.py",
        "return 1 if stack_position(param) is None else tensor_size",
        "return 1",
        "distributed/test_experts.py -k autoep-tensor",
    ),
    Fault(
        "engine/expert_parallel.py",
        "return 1 if stack_position(param) is None else tensor_size",
        "return tensor_size",
        "distributed/test_expert_parallel.py -k tensor-came",
    ),
    Fault(
        "engine/sequence_parallel.py",
        "ranks = list(range(rank % tensor_size, world, tensor_size))",
        "ranks = list(range(world))",
        "distributed/test_ulysses.py -k tensor",
    ),
    Fault(
        "optimizer/bucket_step.py",
        "factors = [1.0 if isinstance(g, Tensor) else g.factor for g in found]",
        "factors = [0.5 if isinstance(g, Tensor) else g.factor for g in found]",
        "distributed/test_ulysses.py -k lomo-1-tensor",
    ),
    # expressions that native code and kernels cannot evaluate
    Fault(
        "ops/executors/batched.py",
        'if "decay" in columns and name not in schema.ADD_WEIGHTS:',
        'if "decay" in columns and not schema.ADD_WEIGHTS:',
        "unit/test_unseen_rule.py -k lerp_of_sum-native",
    ),
    Fault(
        "ops/expressions.py",
        "source.form in forms and source.storage is None",
        "source.form in forms",
        "unit/test_unseen_rule.py -k adam_of_sum-native",
    ),
    # planner: its arithmetic
    Fault(
        "planner/memory.py",
        "(n if n <= PERSIST else 0)",
        "0",
        "distributed/test_memory.py unit/test_memory.py",
    ),
    Fault(
        "planner/memory.py",
        "gradients = size * (run + bucket) + 4 * min(run, SUB_GROUP)",
        "gradients = size * run + 4 * min(run, SUB_GROUP)",
        "distributed/test_memory.py unit/test_memory.py",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--green", action="store_true", help="`make test` passes: do not check it")
    parser.add_argument("--all", action="store_true", help="against the whole of `make test`")
    options = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not options.words or any(w in f"{fault.file} {fault.line}" for w in options.words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        passes: dict[str, bool] = {}
        missed = 0
        for fault in chosen:
            tests = "" if options.all else fault.tests
            if tests not in passes:
                passes[tests] = options.green or run(tree, tests) == ""
            began = time.monotonic()
            if not passes[tests]:
                told = "THE TESTS FAIL WITHOUT IT"
            else:
                by = planted(tree, fault, tests)
                told = f"seen by {by}" if by else "NOT SEEN"
            missed += not told.startswith("seen")
            seconds = time.monotonic() - began
            print(f"{fault.file}: {fault.wrong.strip()}\n{seconds:5.0f} s  {told}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults are seen.")
    sys.exit(missed > 0)


def copied(folder: Path) -> Path:
    """A copy of the files of the tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def planted(tree: Path, fault: Fault, tests: str) -> str:
    """The test that fails with a fault in the tree, which is taken out again; "" if none does."""
    path = tree / "ds_ext" / fault.file
    text = path.read_text()
    assert text.count(fault.line) == 1, f"{fault.file} has {text.count(fault.line)} × {fault.line}"
    path.write_text(text.replace(fault.line, fault.wrong))
    try:
        return run(tree, tests)
    finally:
        path.write_text(text)


def run(tree: Path, tests: str) -> str:
    """The first test, of those that are not slow, that fails in a tree; "" if none does."""
    places = [f"tests/{t}" if t.endswith(".py") else t for t in shlex.split(tests)] or ["tests"]
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-m", "not slow", *places]
    environment = os.environ | {"PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"a hang of {LIMIT} s"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.M)
    return failed[1] if failed else f"pytest's exit status {done.returncode}"


if __name__ == "__main__":
    main()
