"""What does DeepSpeed want? The only folder that imports it, or reads what it sets."""

import deepspeed  # noqa: F401  first of all: its import patches it, by modules of this folder

from ds_ext.engine import versions

versions.check()
