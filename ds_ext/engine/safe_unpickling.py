"""Loads checkpoint files without running code from them.

A pickle can call any function by name. Here it can call only the functions below, which create
plain objects, and functions that the user passed to ``torch.serialization.add_safe_globals``.
"""

import argparse
import collections
import contextlib
import datetime
import decimal
import fractions
import os
import pathlib
import pickle
import re
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_ext.errors import CheckpointError

SWITCH = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch's variable: 1 allows any code
_SAFE: list[Callable[..., Any]] = [
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
    *(range, slice, object, collections.OrderedDict, collections.Counter),
    *(argparse.Namespace, types.SimpleNamespace, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PurePosixPath, pathlib.PurePath, pathlib.PosixPath, pathlib.Path),
    *(ZeroStageEnum, SubparamShape),
]


def _allowed() -> contextlib.AbstractContextManager[None]:
    """Context in which torch.load may create plain objects, NumPy arrays, and DeepSpeed's."""
    array, scalar = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"]}
    allowed = [*_SAFE, np.ndarray, np.dtype, array, scalar, *kinds]
    before = torch.serialization.get_safe_globals()  # which the context must not remove at its end
    return torch.serialization.safe_globals([each for each in allowed if each not in before])


def load(path: Path) -> Any:
    """Returns the contents of a file written by torch.save. Tensors are memory-mapped.

    Raises:
        CheckpointError: the file is damaged, or calls a function that is not known to be safe.
    """
    is_trusted = os.environ.get(SWITCH, "0").lower() in ("1", "y", "yes", "true")
    with _allowed():
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=not is_trusted)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)|WeightsUnpickler error: (.*)", str(error))
            what = (found[1] or found[2]) if found else str(error)
            raise CheckpointError(
                f"{path} was not loaded, because it may run code: {what}. If that is a class of "
                "yours, call torch.serialization.add_safe_globals([...]) with it before you load. "
                f"If you trust the whole file, set {SWITCH}=1 in the environment."
            ) from error
        except Exception as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
