"""Makes a ``torch.optim.Optimizer`` of a rule: groups, state, a plain ``step()``."""

from ds_ext.ops import functions
from ds_ext.ops.executors.unbatched import passes_of_run
from ds_ext.optimizer.registry import OPTIMIZERS as OPTIMIZERS
from ds_ext.optimizer.registry import named as named
from ds_ext.optimizer.rule_optimizer import RuleOptimizer as RuleOptimizer

functions.use(passes_of_run)
