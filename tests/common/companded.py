"""Moments of 8 bits as arXiv 2602.23349 rounds them, written out in NumPy.

They are decoded in fp32, as everywhere: a last bit that differs there would be another code now and
then.
"""

import math

import numpy as np
import torch


def scale_of(x):
    """A positive number rounded to 11 significant bits, within the scales that there are."""
    x = np.float32(min(max(float(x), 2.0**-44), 2.0**20 - 2.0**9))
    spacing = 2.0 ** (math.frexp(x)[1] - 11)
    return np.float32(np.round(x / spacing) * spacing)


def rounded(x, signed):
    """Values as they come back from 8 bits, group by group."""
    flat, out = x.flatten().numpy(), []
    for at in range(0, x.numel(), 32):
        group = flat[at : at + 32] if signed else np.sqrt(flat[at : at + 32])
        most = max(float(np.abs(group).max()), 2.0**-44)
        scale, part = scale_of(most), group / most
        if signed:
            y = 2 * part / (1 + np.abs(part))
            code = np.floor(127 * y + 0.5).astype(np.float32)
            out.append(code / (254 - np.abs(code)) * scale)
        else:
            code = np.floor(255 * part + 0.5).astype(np.float32)
            out.append((code * (scale / np.float32(255))) ** 2)
    return torch.from_numpy(np.concatenate(out)).to(x.dtype).view(x.shape) if out else x
