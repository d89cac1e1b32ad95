"""The native passes, for a wheel that is built where a compiler is; all else is in pyproject.toml.

They are no module of Python but a library that ds_ext/ops/executors/native/library.py finds, which
has the same flags. Without a compiler the wheel is one for all machines.
"""

import hashlib
import os
import shlex
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "ds_ext/ops/executors/native/passes.cpp"
FLAGS = (
    "-O3 -g0 -std=c++17 -pthread -fvisibility=hidden "
    "-fno-math-errno -fno-trapping-math -ffp-contract=off"
)


def is_there(compiler: str) -> bool:
    """Returns whether setuptools will find the compiler that ``compiler`` (CC, CXX) names."""
    command = os.environ.get(compiler) or sysconfig.get_config_var(compiler)
    return bool(command) and shutil.which(shlex.split(command)[0]) is not None


def passes() -> Extension:
    """Returns the library, which can tell what source it was built from."""
    folder = (Path(__file__).parent / SOURCE).parent
    text = b"".join((folder / name).read_bytes() for name in ("schema.h", "passes.cpp"))
    source = hashlib.sha256(text).hexdigest()
    return Extension(
        "ds_ext.ops.executors.native._passes",
        [SOURCE],
        depends=["ds_ext/ops/executors/native/schema.h"],
        language="c++",
        optional=True,
        py_limited_api=True,
        define_macros=[("DS_EXT_SOURCE", f'"{source}"')],
        extra_compile_args=FLAGS.split(),
        extra_link_args=["-pthread"],
    )


setup(ext_modules=[passes()] if is_there("CC") and is_there("CXX") else [])
