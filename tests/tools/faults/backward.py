"""Faults of gradients on their way to a step."""

from tests.tools.faults.fault import ZERO, Fault

FAULTS = (
    # optimizer: gradients that the first round of a step judges
    Fault(
        "ops/executors/triton/kernels/run.py",
        "if tl.load(pointer(t, FOUND, tl.float32)) <= number(t, MOST):",
        "if tl.load(pointer(t, FOUND, tl.float32)) == tl.load(pointer(t, FOUND, tl.float32)):",
        "unit/test_device_nonfinite.py -k come",
    ),
    Fault(
        "optimizer/bucket_optimizer.py",
        "                    cache.forget()",
        "                    pass",
        "unit/test_device_nonfinite.py -k come",
    ),
    Fault(
        "optimizer/bucket_step.py",
        "good = found.numpy() <= self.plan.upper_bounds",
        "good = own.numpy() <= self.plan.upper_bounds",
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
    # backward: gradients on their way
    Fault(
        "backward/reduction.py",
        "(found > nonfinite.MAX_GOOD_VOTES).unbind()",
        "(found > 8 * nonfinite.MAX_GOOD_VOTES).unbind()",
        "distributed/test_nonfinite.py",
    ),
    Fault("backward/buckets.py", "return flat.clone()", "return flat", ZERO + "'2- and authors'"),
    Fault(
        "backward/buckets.py",
        "own = before if own is None else before + own",
        "own = before if own is None else own",
        ZERO + "reentrant",
    ),
    Fault(
        "optimizer/bucket_step.py",
        "if is_good:",
        "if True:",
        "unit/test_nonfinite.py -k had_not_come",
    ),
    Fault(
        "optimizer/bucket_step.py",
        "arrays.limits = self._limits(found, self.plan.upper_bounds, check, is_square=True)",
        "self._limits(found, self.plan.upper_bounds, check, is_square=True)",
        "unit/test_device_nonfinite.py -k had_not_come",
    ),
    Fault(
        "backward/receivers.py",
        "        if not self.state.bad:\n            self.stepper",
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
)
