"""Runs each client program in a fresh environment and writes the table of docs/clients.md.

    python -m tests.tools.clients [NAME ...] [--only WORDS] [--keep] [--reuse]

runs the named clients, or all of them. Each gets a virtual environment under build/clients with
the versions of table.py. Its script trains a tiny random model with AdaLomo on the CPU, offline. It
passes if it exits with 0 and prints ``RESULT {"losses": [first, last], "ranks": 2, "stage": 3}``
with a loss that falls. Logs are in build/clients.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.tools import blocks
from tests.tools.clients.table import CLIENTS, Client

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "clients"
PAGE = ROOT / "docs/clients.md"
HEAD = tuple("client|run|ranks|ZeRO stage|loss|date".split("|"))
INSTALL_MINUTES = 30


class Failed(Exception):
    """A step that failed, in the words of its row."""


def call(command: list[str], log: IO[str], minutes: float, **where: object) -> str:
    """Returns the output of a command, and kills all its processes if it takes too long."""
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    start = log.tell()
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp, **where
    )
    late = False
    try:
        process.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        end(process)
    with open(log.name, errors="replace") as written:
        written.seek(start)
        output = written.read()
    log.seek(0, os.SEEK_END)
    if late:
        raise Failed(f"failed: not finished after {minutes:g} minutes")
    if process.returncode:
        raise Failed(reason(output, process.returncode))
    return output


def end(process: subprocess.Popen) -> None:
    """Ends a process and its children; a launcher is given time to end its ranks."""
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def reason(output: str, status: int) -> str:
    """Returns the line of the output that says why it failed."""
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in output.splitlines()]
    for pattern in (r"not run: ", r"[\w.]+(Error|Exception): .", r"ERROR: ."):
        for line in lines:
            if re.match(pattern, line):
                return line[:160] if line.startswith("not run") else f"failed: {line[:160]}"
    return f"failed: exit status {status}"


def install(client: Client, folder: Path, log: IO[str], index: str) -> None:
    """Makes the environment of a client: torch first, DeepSpeed beside it, then the client."""
    python = shutil.which(f"python{client.python}")
    if not python or subprocess.run([python, "-V"], capture_output=True).returncode:
        raise Failed(f"not run: there is no python{client.python} on PATH that starts")
    call([python, "-m", "venv", "--without-pip", str(folder)], log, INSTALL_MINUTES)
    pins = folder / "constraints.txt"
    pins.write_text(f"torch=={client.torch}\ndeepspeed=={client.deepspeed}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    pip += ["--progress-bar", "off", "--no-compile", "-c", str(pins)]
    build = "--no-build-isolation"
    for arguments in (
        [f"torch=={client.torch}", *(["--extra-index-url", index] if index else [])],
        ["setuptools>=74.1", "wheel", "ninja", "numpy"],
        [build, f"deepspeed=={client.deepspeed}"],
        *(shlex.split(packages) for packages in client.packages),
        [build, "--no-deps", "-e", str(ROOT)],
    ):
        call([*pip, *arguments], log, INSTALL_MINUTES, env={**os.environ, "DS_BUILD_OPS": "0"})


def version(folder: Path, package: str) -> str:
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    python = folder / "bin" / "python"
    if not python.exists():
        return ""
    command = [str(python), "-c", code, package]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def train(client: Client, command: str, folder: Path, log: IO[str]) -> dict[str, object]:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    for lock in (folder / "extensions").rglob("lock"):  # of a build that was killed
        lock.unlink()
    with tempfile.TemporaryDirectory() as place:
        words = [word.replace("{here}", str(HERE)) for word in shlex.split(command)]
        words[0] = shutil.which(words[0], path=environment["PATH"]) or words[0]
        output = call(words, log, client.minutes, cwd=place, env=environment)
    printed = re.findall(r"^RESULT (\{.*\})$", output, re.M)
    if not printed:
        raise Failed("failed: no RESULT was printed")
    result = json.loads(printed[-1])
    first, last = result["losses"]
    if not (math.isfinite(first) and math.isfinite(last) and last < first):
        raise Failed(f"failed: the loss went from {first:.3g} to {last:.3g}")
    return result


def rows_of(client: Client, given: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Installs a client, makes its runs, and yields a row of the table for each."""
    folder, failed = BUILD / client.name, ""
    if not given.reuse:
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        try:
            with open(BUILD / f"{client.name}.log", "w") as log:
                install(client, folder, log, given.torch_index)
        except Failed as error:
            failed = f"{error} (install)"
    for run in client.runs:
        if given.only not in f"{run.package} {run.what}":
            continue
        ranks, stage, loss = "", "", failed
        try:
            name = re.sub(r"\W+", "-", f"{run.package} {run.what}")
            with open(BUILD / f"{name}.log", "w") as log:
                result = None if failed else train(client, run.command, folder, log)
        except Failed as error:
            loss = str(error)
        else:
            if result:
                ranks, stage = str(result["ranks"]), str(result["stage"])
                loss = "{:.3g} → {:.3g}".format(*result["losses"])
        yield (
            f"{run.package} {version(folder, run.package)}".strip(),
            *(run.what, ranks, stage, loss, datetime.date.today().isoformat()),
        )
    if not given.keep and not given.reuse:
        shutil.rmtree(folder, ignore_errors=True)


def write(row: tuple[str, ...]) -> None:
    """Puts a row into the table, in the order of CLIENTS, in the place of its older one."""
    own = [cell.replace("|", "/") or "–" for cell in row]
    kept = {(row[0].split()[0], row[1]): row for row in [*blocks.rows(PAGE, "clients"), own]}
    order = [(run.package, run.what) for client in CLIENTS for run in client.runs]
    made = blocks.table(HEAD, [kept[key] for key in order if key in kept])
    blocks.write(PAGE, "clients", made)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.clients", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument("--reuse", action="store_true", help="use what --keep left")
    parser.add_argument("--only", default="", help="the runs whose row has these words")
    parser.add_argument("--torch-index", default="", help="an index of CPU builds of torch")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    ok = True
    for client in CLIENTS:
        if not given.names or client.name in given.names:
            for row in rows_of(client, given):
                print(*row, sep=" | ", flush=True)
                write(row)
                ok = ok and not any(cell.startswith("failed") for cell in row)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
