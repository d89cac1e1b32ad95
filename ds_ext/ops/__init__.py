"""How is memory passed over? Tensors and the geometry of runs; nothing here knows of a rule.

``ops.apply_(...)`` and the other passes are reached from here.
"""

from ds_ext.ops.passes import *  # noqa: F403
from ds_ext.ops.passes import __all__ as __all__
