"""What is a rule to PyTorch? torch.optim.Optimizer around it: groups, state, a plain ``step()``."""

from ds_ext.optimizer.registry import OPTIMIZERS as OPTIMIZERS
from ds_ext.optimizer.registry import named as named
from ds_ext.optimizer.rule_optimizer import RuleOptimizer as RuleOptimizer
