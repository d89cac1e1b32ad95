"""Random damage to the native library in a cache folder, which must not be loaded."""

import ctypes
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from ds_ext.ops.executors.native import library


def cut_short(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.choice([0, 1, 31, draw.randrange(len(content))])])


def changed_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def longer(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.choice([1, 32, 4096])))


def zeros(path: Path, draw: random.Random) -> None:
    """The length is right and the content was never written, as after a power loss."""
    path.write_bytes(bytes(path.stat().st_size))


def writable_by_others(path: Path, draw: random.Random) -> None:
    path.chmod(draw.choice([0o775, 0o757, 0o777]))


def removed(path: Path, draw: random.Random) -> None:
    path.unlink()


Damage = Callable[[Path, random.Random], None]
DAMAGES: list[Damage] = [cut_short, changed_bit, longer, zeros, writable_by_others, removed]


def play(seed: int) -> None:
    """Damages a library a few times; each time it is built again before it is loaded."""
    draw = random.Random(seed)
    good = library._built()
    content, builds = good.read_bytes(), []

    def build(compiler: str, path: Path) -> Path:
        builds.append(path)
        return Path(shutil.copy2(good, path))  # a compiler takes half a minute

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            mock.patch.object(library, "cache_folder", lambda: folder),
            mock.patch.object(library, "_build", build),
        ):
            path = library._built()
            for count, damage in enumerate(draw.choices(DAMAGES, k=4), 2):
                damage(path, draw)
                assert library._built() == path, damage.__name__
                assert len(builds) == count, f"{damage.__name__}: the library was not built again"
                assert path.read_bytes() == content and library._is_safe(path), damage.__name__
        assert ctypes.CDLL(str(path)).passes_entry_bytes() > 0
