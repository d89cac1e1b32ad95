"""The faults that `python -m tests.tools.plant_faults` plants, by what they break."""

from tests.tools.faults import backward, engine, kernels, numerics, ranks

FAULTS = (*numerics.FAULTS, *kernels.FAULTS, *ranks.FAULTS, *backward.FAULTS, *engine.FAULTS)
