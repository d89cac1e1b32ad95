"""Faults of checkpoints, of the engine beside DeepSpeed and of the planner."""

from tests.tools.faults.fault import ZERO, Fault

FAULTS = (
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
        "for name in _own_files(place) - moved:",
        "for name in ():",
        "unit/test_saving_over.py -k killed",
    ),
    Fault(
        "checkpoint/folder.py",
        "_finish_killed(place)  # another job may have been killed meanwhile",
        "pass",
        "unit/test_saving_over.py -k killed",
    ),
    Fault(
        "checkpoint/manifests.py",
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
        "for param in (*self.updated, *persistent):",
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
        "engine/layouts.py",
        "(tensor_size if is_autoep else 1)",
        "1",
        "distributed/test_experts.py -k autoep-tensor",
    ),
    Fault(
        "engine/layouts.py",
        "(tensor_size if is_autoep else 1)",
        "tensor_size",
        "distributed/test_expert_parallel.py -k tensor-came",
    ),
    Fault(
        "optimizer/bucket_step.py",
        "factors.append(g.factor if is_scaled else 1.0)",
        "factors.append(g.factor if is_scaled else 0.5)",
        "distributed/test_ulysses.py -k lomo-1",
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
