"""Runs each client program in a fresh environment and writes the table of docs/clients.md.

    python -m tests.clients [NAME ...] [--keep] [--torch-index URL]

runs the named clients, or all of them. Each gets a virtual environment under build/clients with
the versions below. Its script trains a tiny random model with AdaLomo on the CPU, offline. It
passes if it exits with 0 and prints ``RESULT {"losses": [first, last], "ranks": 2, "stage": 3}``
with a loss that falls. The output of NAME is in build/clients/NAME.log.
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
from pathlib import Path
from typing import IO, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "clients"
PAGE = ROOT / "docs" / "clients.md"
START, END = "<!-- clients: make clients -->", "<!-- end of clients -->"
HEAD = ("client", "run", "ranks", "ZeRO stage", "Python", "torch", "DeepSpeed", "loss", "date")
INSTALL_MINUTES = 30


class Client(NamedTuple):
    """A program, how to install it, and what to run of it."""

    name: str  # on the command line
    package: str  # the distribution whose version the table shows
    packages: tuple[str, ...]  # arguments of one `pip install` each
    runs: dict[str, str]  # what the table says was run: the command, with {here} for tests/clients
    minutes: float = 5  # the limit of each run
    python: str = "3.11"
    deepspeed: str = "0.19.8"
    torch: str = "2.13.0"


HF = "transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0"
TORCHRUN = "torchrun --nproc_per_node 2 {here}"
CLIENTS = (
    Client(
        "trl",
        "trl",
        (f"trl==1.16.0 {HF}",),
        {
            "SFTTrainer": f"{TORCHRUN}/run_trl.py sft",
            "DPOTrainer": f"{TORCHRUN}/run_trl.py dpo",
        },
    ),
    Client(
        "axolotl",
        "axolotl",
        ("axolotl==0.21.0 transformers==5.20.1 trl==1.14.1 peft==0.21.2 accelerate==1.15.0",),
        {"full SFT, plugin": "python {here}/run_axolotl.py"},
        minutes=15,
        python="3.12",
    ),
    Client(  # without torchaudio, torchvision and the web interface
        "llama-factory",
        "llamafactory",
        (
            "--no-deps llamafactory==0.9.5",
            "transformers==5.6.0 accelerate==1.11.0 datasets==4.0.0 peft==0.18.1 trl==0.24.0",
            "torchdata==0.11.0 tyro==0.8.14 av==16.0.0 matplotlib fire omegaconf pandas scipy",
            "sentencepiece tiktoken protobuf",
        ),
        {"full SFT, YAML": "python {here}/run_llama_factory.py"},
        minutes=10,
    ),
    Client(
        "ms-swift",
        "ms-swift",
        ("ms-swift==4.6.0 transformers==5.19.0 trl==0.29.1 peft==0.20.0 datasets==4.8.4",),
        {"full SFT, plugin": "python {here}/run_ms_swift.py"},
        minutes=10,
    ),
    Client(  # without flash-attn, vllm and ray
        "openrlhf",
        "openrlhf",
        (
            "--no-deps openrlhf==0.11.2",
            "transformers==5.15.0 accelerate==1.15.0 datasets==5.2.0 peft==0.21.2",
            "torchdata==0.11.0 sympy pylatexenc tqdm aiohttp packaging",
        ),
        {"SFT, CUDA calls replaced": "python {here}/run_openrlhf.py"},
        minutes=10,
        deepspeed="0.19.6",
    ),
    Client(  # without what its trainers need of CUDA
        "verl",
        "verl",
        (
            "--no-deps verl==0.9.1",
            "transformers==5.10.2 accelerate==1.15.0 tensordict==0.10.0 torchdata==0.11.0",
            "omegaconf hydra-core ray codetiming pandas numpy<2.4",
        ),
        {"build_optimizer": "python {here}/run_verl.py"},
    ),
)


class Failed(Exception):
    """A step that failed, in the words of its row."""


def call(command: list[str], log: IO[str], minutes: float, **where: object) -> str:
    """Returns the output of a command, and kills all its processes if it takes too long."""
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    start = log.tell()
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, **where
    )
    late = False
    try:
        process.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with open(log.name, errors="replace") as written:
        written.seek(start)
        output = written.read()
    log.seek(0, os.SEEK_END)
    if late:
        raise Failed(f"failed: not finished after {minutes:g} minutes")
    if process.returncode:
        raise Failed(reason(output, process.returncode))
    return output


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
    if not python:
        raise Failed(f"not run: there is no python{client.python}")
    call([python, "-m", "venv", str(folder)], log, INSTALL_MINUTES)
    pins = folder / "constraints.txt"
    pins.write_text(f"torch=={client.torch}\ndeepspeed=={client.deepspeed}\n")
    build = "--no-build-isolation"
    for arguments in (
        ["--extra-index-url", index, f"torch=={client.torch}"]
        if index
        else [f"torch=={client.torch}"],
        ["setuptools>=74.1", "wheel", "ninja", "numpy"],
        [build, f"deepspeed=={client.deepspeed}"],
        *(shlex.split(packages) for packages in client.packages),
        [build, "--no-deps", "-e", str(ROOT)],
    ):
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-c", str(pins)]
        call([*pip, *arguments], log, INSTALL_MINUTES, env={**os.environ, "DS_BUILD_OPS": "0"})


def versions(folder: Path, package: str) -> list[str]:
    """Returns the versions of the client, Python, torch and DeepSpeed in an environment."""
    code = (
        "import sys, platform, importlib.metadata as m; print(m.version(sys.argv[1]),"
        "platform.python_version(), m.version('torch'), m.version('deepspeed'))"
    )
    command = [str(folder / "bin" / "python"), "-c", code, package]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def train(client: Client, command: str, folder: Path, log: IO[str]) -> dict[str, object]:
    """Runs a client's script, and returns its result."""
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


def rows_of(client: Client, index: str, keep: bool) -> list[tuple[str, ...]]:
    """Installs a client, makes its runs, and returns a row of the table for each."""
    folder = BUILD / client.name
    shutil.rmtree(folder, ignore_errors=True)
    today, rows = datetime.date.today().isoformat(), []
    known = ["", client.python, client.torch, client.deepspeed]
    failed = ""
    with open(BUILD / f"{client.name}.log", "w") as log:
        try:
            install(client, folder, log, index)
            known = versions(folder, client.package)
        except Failed as error:
            failed = f"{error} (install)"
        for what, command in client.runs.items():
            ranks = stage = ""
            loss = failed
            if not failed:
                try:
                    result = train(client, command, folder, log)
                    ranks, stage = str(result["ranks"]), str(result["stage"])
                    loss = "{:.3g} → {:.3g}".format(*result["losses"])
                except Failed as error:
                    loss = str(error)
            version, *others = known
            name = f"{client.name} {version}".strip()
            rows.append((name, what, ranks, stage, *others, loss, today))
            print(*rows[-1], sep=" | ", flush=True)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def write(rows: list[tuple[str, ...]]) -> None:
    """Replaces the rows of the table that were run again, in the order of CLIENTS."""
    before, table, after = re.split(f"{START}|{END}", PAGE.read_text())
    old = [tuple(line.strip("| ").split(" | ")) for line in table.strip().splitlines()[2:]]
    kept = {(row[0].split()[0], row[1]): row for row in old}
    escaped = [tuple(cell.replace("|", "\\|") or "–" for cell in row) for row in rows]
    kept |= {(row[0].split()[0], row[1]): row for row in escaped}
    order = [(client.name, what) for client in CLIENTS for what in client.runs]
    lines = [HEAD, ("---",) * len(HEAD), *(kept[key] for key in order if key in kept)]
    made = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    PAGE.write_text(f"{before}{START}\n{made}{END}{after}")


def main() -> None:
    """Runs the clients that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument("--torch-index", default="", help="an index of CPU builds of torch")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    ok = True
    for client in CLIENTS:
        if not given.names or client.name in given.names:
            rows = rows_of(client, given.torch_index, given.keep)
            ok = ok and not any("failed" in cell for row in rows for cell in row)
            write(rows)
    sys.exit(not ok)


if __name__ == "__main__":
    main()
