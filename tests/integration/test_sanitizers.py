"""passes.cpp under sanitizers of the compiler: of addresses and undefined behaviour, of threads.

Its builds are loaded by a process of their own (``tests.common.sanitized``), which steps random
optimizers and edits their states. What is wrong has to be refused before it gets there.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ds_ext.ops import schema
from ds_ext.ops.executors.native import library
from tests.common import apart

pytestmark = pytest.mark.slow

# What is loaded first, and the options that it reads.
LIBRARIES = {"address,undefined": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # Python's
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
}
TRIALS = {"address,undefined": 200, "thread": 25}
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=undefined -DDS_EXT_PLAIN".split()


@pytest.fixture(scope="session", params=LIBRARIES)
def built(request, tmp_path_factory):
    """The sanitizer, the build, and the libraries that are to be loaded before Python's."""
    found = [of_compiler(name) for name in LIBRARIES[request.param]]
    if not all(found):
        pytest.skip(f"there is no g++ with {' and '.join(LIBRARIES[request.param])}")
    path = tmp_path_factory.mktemp("sanitized") / "passes.so"
    own = [flag for flag in library.FLAGS if flag != "-O3"]
    flags = [*own, *FLAGS, f"-fsanitize={request.param}"]
    path.with_name("schema.h").write_text(schema.header())
    command = ["g++", *flags, f"-I{path.parent}", "-o", path, library.SOURCE]
    subprocess.run(command, check=True, timeout=300)
    return request.param, path, " ".join(found)


def of_compiler(name):
    """The file of a library that the compiler brings; empty if it does not."""
    if shutil.which("g++") is None:
        return ""
    asked = ["g++", f"-print-file-name={name}"]
    path = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return path if Path(path).is_absolute() else ""


def run(built, *options):
    _, path, first = built
    own = OPTIONS | {"LD_PRELOAD": first, "CUDA_VISIBLE_DEVICES": ""}
    program = "tests.common.sanitized"
    return apart.python("-m", program, path, *options, timeout=300, fails=True, **own)


def test_nothing_that_is_stepped_goes_out_of_bounds(built):
    large = ["--large"] if built[0] == "thread" else []
    ended = run(built, "--trials", str(TRIALS[built[0]]), *large)
    assert ended.returncode == 0, ended.stderr[:5000]
    done = json.loads(ended.stdout)
    assert done["stepped: nothing"] and (large or done["refused: edit"])


def test_a_planted_fault_is_seen(built):
    """A state that is too short for its weights; two steps of one parameter at once."""
    plant = "race" if built[0] == "thread" else "size"
    ended = run(built, "--trials", "0", "--plant", plant)
    assert ended.returncode != 0
    assert {"race": "data race", "size": "heap-buffer-overflow"}[plant] in ended.stderr
    assert "passes.cpp" in ended.stderr
