"""Faults of what ranks hold, and of what they tell each other."""

from tests.tools.faults.fault import FSDP2, ZERO, Fault

FAULTS = (
    # unsplit parameters under tensor parallelism
    Fault(
        "distributed/placement.py",
        "if size_of(self.replicas) == 1:",
        "if size_of(self.replicas) >= 1:",
        "distributed/test_tensor_parallel.py -k llama-muon-3",
    ),
    # backward passes that fail at different layers
    Fault(
        "distributed/layout.py",
        "if int(counts[1, -1]) != own_history * self.world:",
        "if False:",
        "distributed/test_failed_passes.py -k stage1-1-3",
    ),
    Fault(
        "backward/torch_calls.py",
        "by.leave_pass()",
        "pass",
        "distributed/test_failed_passes.py -k goes_on",
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
    # stages of a pipeline
    Fault(
        "distributed/pipeline_layout.py",
        "return self._all_reduce(own.to(dtype), group)",
        "return own.to(dtype)",
        "distributed/test_pipelines.py -k adalomo-2-2-1",
    ),
    Fault(
        "engine/pipeline.py",
        "made.num_replicas *= stages",
        "made.num_replicas *= 1",
        "distributed/test_pipelines.py -k adalomo-2-2-1",
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
        "distributed/test_bucket_order.py",
    ),
    Fault(
        "distributed/consensus.py",
        "        if are_alike():\n            return",
        "        are_alike()\n        return",
        "distributed/test_bucket_order.py",
    ),
    Fault(
        "distributed/consensus.py",
        "if len(set(gathered(digest, group))) == 1:",
        "if digest:",
        "distributed/test_faults.py -k differ",
    ),
)
