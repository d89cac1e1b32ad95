"""Packages to carry to a GPU machine without network, as wheels in a folder that git ignores."""

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

FOLDER = ".whl"
OURS = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection")  # imported by ds_ext
DEEPSPEEDS = ("hjson", "msgpack", "einops", "py-cpuinfo", "ninja")
SOURCE_ONLY = "deepspeed"
NEEDED = {name: "ds_ext" for name in OURS} | {
    name: "DeepSpeed" for name in (*DEEPSPEEDS, SOURCE_ONLY)
}
# pip compares the number of a manylinux tag exactly.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def listed(folder: Path = Path(FOLDER), python: str = "3.12") -> str:
    """Returns the wheels that a machine with ``python`` needs, and the commands that get them."""
    from benchmarks import report

    rows: list[dict[str, object]] = []
    for name, user in NEEDED.items():
        found = carried(folder, name)
        rows.append(
            {
                "package": name,
                "version": version(name),
                "needed by": user,
                "MB": found.stat().st_size / 1e6 if found else None,
                "wheel": found.name if found else "missing",
            }
        )
    return f"{report.table(rows)}\n\n" + "\n".join(commands(folder, python))


def commands(folder: Path, python: str) -> list[str]:
    """The commands that fill the folder, on a machine with a network."""
    pinned = [_pinned(name) for name in NEEDED if name != SOURCE_ONLY]
    platforms = [f"--platform {tag}" for tag in PLATFORMS]
    return [
        f"pip download --no-deps --only-binary=:all: --implementation cp --python-version {python} "
        f"{' '.join(platforms)} -d {folder} {' '.join(pinned)}",
        "# DeepSpeed is published as source. Its wheel is for every Python. Build it where torch is"
        " installed:",
        f"pip wheel --no-deps --no-build-isolation -w {folder} {_pinned(SOURCE_ONLY)}",
    ]


def _pinned(name: str) -> str:
    found = version(name)
    return f"{name}=={found}" if found else name


def version(name: str) -> str:
    """The version that is installed here; empty if it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def carried(folder: Path, name: str) -> Path | None:
    """The wheel of a package in the folder."""
    wanted = name.replace("-", "_").lower()
    for path in sorted(folder.glob("*.whl")):
        if path.name.partition("-")[0].replace("-", "_").lower() == wanted:
            return path
    return None


def installed(folder: Path, site: Path) -> Path | None:
    """Installs carried wheels, without a network, where this Python lacks them.

    Args:
        folder: of the wheels.
        site: where to install them.

    Returns:
        ``site``, for PYTHONPATH; None if there is nothing to install.
    """
    lacking = [path for name in NEEDED if _is_lacking(name) and (path := carried(folder, name))]
    if not lacking:
        return None
    done = site / "installed"
    names = "\n".join(path.name for path in lacking)
    if not done.exists() or done.read_text() != names:
        options = ["--no-index", "--no-deps", "--upgrade", "--quiet", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *lacking], check=True)
        done.write_text(names)
    return site


def _is_lacking(name: str) -> bool:
    modules = {"py-cpuinfo": "cpuinfo"}
    return importlib.util.find_spec(modules.get(name, name.replace("-", "_"))) is None
