"""Integration with DeepSpeed. No other package imports DeepSpeed or reads its attributes."""

import deepspeed  # this import applies the patches of this package

from ds_ext import contract

contract.check_lowest("deepspeed", deepspeed.__version__)
