"""A pytest plugin: declares operators that torchvision lacks where torch is a CPU build.

torchvision comes from PyPI as a CUDA build, cannot load its operators here, and fails when it
describes these two. The tests that are run call neither.
"""

import torch

for name in ("nms", "qnms"):
    schema = "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"
    torch.library.define(f"torchvision::{name}", schema)
