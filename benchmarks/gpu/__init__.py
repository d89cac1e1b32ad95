"""The first session on a GPU: whether ds_ext is right there, what memory it needs, how fast it is.

``python -m benchmarks gpu --all`` runs the stages of ``session.py`` one after another, and writes a
result file after each. This module imports neither ds_ext nor DeepSpeed, which a new GPU machine
may lack.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from benchmarks.gpu import session

    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="all stages, in their order")
    what.add_argument(
        "--stage", nargs="+", choices=[stage.name for stage in session.STAGES], help="only these"
    )
    parser.add_argument("--fresh", action="store_true", help="repeat stages that have passed")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU as if on a GPU")
    parser.add_argument("--folder", type=Path, help="of the result files")


def main(args: argparse.Namespace) -> None:
    """Runs stages, and prints the table of their results; exits with 1 if one failed."""
    from benchmarks.gpu import session

    names = args.stage or [stage.name for stage in session.STAGES]
    runner = session.Runner(args.rehearse, args.folder, args.fresh)
    if not runner.run(names):
        raise SystemExit(1)
