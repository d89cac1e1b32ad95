"""What every test needs before ds_ext is imported: an accelerator by name, one thread a process."""

import os

import torch
from hypothesis import settings

# DeepSpeed looks for an accelerator itself and may not settle on the CPU where there is none.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

torch.set_num_threads(1)  # simulated and real ranks share the cores; also the order of sums

# The same examples at every run: a red test is red for everyone.
settings.register_profile("ds_ext", deadline=None, derandomize=True, database=None)
settings.load_profile("ds_ext")
