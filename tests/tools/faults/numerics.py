"""Faults of operations, expressions and rules."""

from tests.tools.faults.fault import Fault

FAULTS = (
    # ops: passes over memory
    Fault(
        "ops/shard.py",
        "return (square_sum / max(1, self.numel)) ** 0.5",
        "return (square_sum / max(1, len(self))) ** 0.5",
        "unit/test_formulas.py unit/test_rules.py -k 'equals or padding'",
    ),
    Fault(
        "ops/rounding.py",
        "+ step * schema.PRIME2) % 2**32",
        "+ schema.PRIME2) % 2**32",
        "unit/test_normal.py",
    ),
    Fault(
        "ops/sixteen_bit.py",
        "upper = (bits + 0x8000)",
        "upper = (bits + 0x0000)",
        "unit/test_precision.py",
    ),
    Fault(
        "ops/executors/reference.py",
        "u, weight_decay, lr = times(u, lr), lr * weight_decay, 1.0",
        "u, weight_decay, lr = times(u, lr), weight_decay, 1.0",
        "unit/test_formulas.py",
    ),
    Fault(
        "ops/quantize.py",
        "absmax.copy_(quant_state.absmax)",
        "absmax.copy_(quant_state.absmax.max())",
        "unit/test_galore_8bit.py",
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
        'if s["step"] != step:',
        'if s["step"] == "":',
        "unit/test_native.py unit/test_optimizer.py",
    ),
    Fault(
        "ops/executors/reference.py",
        "sums[b.mats] += square.mul_(new.square()",
        "sums[b.mats] += square.mul_(new",
        "unit/test_formulas.py -k 'sharded and (sinkgd or scale)'",
    ),
    Fault(
        "ops/executors/tables.py",
        "layout is None or layout.dtype not in dtypes",
        "layout is None",
        "unit/test_unseen_rule.py -k 'native and bf16 and (lerp_from or sign)'",
    ),
    Fault(
        "ops/expressions.py",
        "x = read(self.x, b) * self.factor",
        "x = read(self.x, b).mul_(self.factor)",
        "unit/test_unseen_rule.py -k may_run",
    ),
    Fault(
        "ops/executors/reference.py",
        "clamp_(max=LARGEST).masked_fill_(v == 0, 0)",
        "clamp_(max=LARGEST)",
        "unit/test_every_rule.py -k 'smallest_eps and ops and adalomo'",
    ),
    # expressions that native code and kernels cannot evaluate
    Fault(
        "ops/executors/table_passes.py",
        'if "decay" in source.scalars and name not in schema.ADD_WEIGHTS:',
        'if "decay" in source.scalars and not schema.ADD_WEIGHTS:',
        "unit/test_unseen_rule.py -k lerp_of_sum-native",
    ),
    Fault(
        "ops/expressions.py",
        "source.form in forms and source.storage is None",
        "source.form in forms",
        "unit/test_unseen_rule.py -k adam_of_sum-native",
    ),
    # rules: the formulas
    Fault(
        "rules/adalomo.py",
        "shard.rms(p_sq).clamp(min=eps2)",
        "shard.rms(p_sq).clamp(min=0)",
        "unit/test_formulas.py -k adalomo",
    ),
    Fault(
        "rules/came.py",
        "sums, eps2, beta3, shard)",
        "sums, eps2, beta2, shard)",
        "unit/test_formulas.py -k came",
    ),
    Fault(
        "rules/factored.py",
        "(clip / shard.rms(u_sq)).clamp(max=1)",
        "(clip / shard.rms(u_sq)).clamp(min=1)",
        "unit/test_formulas.py",
    ),
    Fault(
        "rules/lamb.py",
        "ratio = ratio.where((p_sq > 0) & (u_sq > 0), 1.0)",
        "ratio = ratio.where(p_sq >= 0, 1.0)",
        "unit/test_formulas.py unit/test_lamb.py -k lamb",
    ),
    Fault(
        "rules/galore.py",
        "if (t - 1) % self.update_proj_gap == 0:",
        "if t % self.update_proj_gap == 0 or t == 1:",
        "unit/test_formulas.py -k galore",
    ),
)
