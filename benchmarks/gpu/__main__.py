"""One stage, in a process of its own: ``python -m benchmarks.gpu STAGE FILE [--rehearse]``.

Each row is printed, and appended to FILE at once, so that the rows of a stage that crashes or takes
too long are kept.
"""

import importlib
import json
import sys
import traceback
from typing import IO

from benchmarks import report


def main(name: str, path: str, is_rehearsal: bool) -> None:
    """Runs a stage; exits with 1 if it fails."""
    with open(path, "a") as file:
        try:
            wrong = run(name, is_rehearsal, file)
        except (Exception, SystemExit) as error:
            if type(error).__name__ == "Skip":
                note(file, "skipped", str(error))
                return
            traceback.print_exc()
            note(file, "failed", f"{type(error).__name__}: {error}")
            raise SystemExit(1) from error
        if wrong:
            note(file, "failed", f"{wrong} rows have the verdict WRONG")
            raise SystemExit(1)


def run(name: str, is_rehearsal: bool, file: IO[str]) -> int:
    """Runs a stage, notes its rows, and returns how many of them are wrong."""
    from benchmarks.gpu import setting  # which imports ds_ext, whose error is noted too

    on = setting.here(is_rehearsal)
    stage = importlib.import_module(f"benchmarks.gpu.{name}")
    wrong = 0
    with setting.using_kernels(on.trains_by):
        for heading, row in stage.rows(on):
            print(report.table([row]), flush=True)
            note(file, "row", [heading, row])
            wrong += str(row.get("verdict")).startswith(setting.WRONG)
    return wrong


def note(file: IO[str], kind: str, what: object) -> None:
    """Appends a line of JSON."""
    file.write(json.dumps([kind, what], default=str) + "\n")
    file.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--rehearse" in sys.argv[3:])
