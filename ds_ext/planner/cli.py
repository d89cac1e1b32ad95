"""The command line: a function for each command."""

import argparse

import ds_ext
from ds_ext.planner import plan


def main(argv: list[str] | None = None) -> int:
    """Runs a command -> exit code; a wrong option ends the process with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m ds_ext", description="Fused, sharded optimizers for DeepSpeed."
    )
    parser.add_argument("--version", action="version", version=f"ds_ext {ds_ext.__version__}")
    plan_parser = parser.add_subparsers(dest="command", metavar="COMMAND").add_parser(
        "plan",
        help="print the bytes per rank of an optimizer, of AdamW and of Megatron-LM",
        description="Bytes per rank of an optimizer at each ZeRO stage, beside AdamW in DeepSpeed "
        "and Megatron-LM's distributed optimizer. Activations are not counted.",
    )
    plan.add_options(plan_parser)
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        plan.run(options)
    except ValueError as error:
        plan_parser.error(str(error))
    return 0
