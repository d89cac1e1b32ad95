"""Plugin for ms-swift: pass this file as ``--external_plugins``, and a name as ``--optimizer``."""

from swift.optimizers import OptimizerCallback, optimizers_map

from ds_ext.optimizer import OPTIMIZERS
from ds_ext.rates import RATES


class Callback(OptimizerCallback):
    """Makes an optimizer of all trained parameters; HYPERS are its other hyper-parameters."""

    HYPERS = {}

    def create_optimizer(self, model=None):
        args, model = self.args, model or self.trainer.model
        params = [p for p in model.parameters() if p.requires_grad]
        hypers = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        own = RATES[args.optimizer].params  # with which our learning rates were measured
        return OPTIMIZERS[args.optimizer](params, **{**own, **hypers, **self.HYPERS})


optimizers_map.update(dict.fromkeys(OPTIMIZERS, Callback))
