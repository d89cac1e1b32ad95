"""Integration with DeepSpeed. No other package imports DeepSpeed or reads its attributes."""

import deepspeed  # noqa: F401  first: this import applies the patches of this package

from ds_ext.engine import deepspeed_versions

deepspeed_versions.check()
