"""What does DeepSpeed want? The only package that imports it, or reads attributes that it sets."""

import deepspeed  # noqa: F401  first: importing it patches it, with modules of this package

from ds_ext.engine import versions

versions.check()
