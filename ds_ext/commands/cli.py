"""The command line: one parser, and a function for each command."""

import argparse
import importlib
from typing import Any, NoReturn

import ds_ext
from ds_ext.commands import check, config, plan, run, selftest
from ds_ext.hyperparams import did_you_mean

# Each module has DESCRIPTION, whose first sentence is listed with those of the others,
# ``add_options`` and ``run``, which returns the exit code (None for 0) and raises ValueError for a
# wrong option.
MODULES: list[Any] = [plan, config, check, run, selftest]
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in MODULES}


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with code 2."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help)\n")


def _unknown(arguments: list[str], parser: Parser) -> str:
    """The message about arguments that a command does not have, with the nearest known option."""
    unknown = next((word for word in arguments if word.startswith("-")), arguments[0])
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    guess = did_you_mean(unknown.partition("=")[0], options)
    return f"unknown {'option' if unknown.startswith('-') else 'argument'} {unknown}.{guess}"


def _import(name: str) -> None:
    """Imports a module of the user; ValueError if there is none of this name."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--import {name}: {error}. A module is found in this folder, on PYTHONPATH and among "
            "installed packages; its name has no .py."
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. A wrong option ends the process with code 2."""
    parser = Parser(prog="python -m ds_ext", description="Fused, sharded optimizers for DeepSpeed.")
    parser.add_argument("--version", action="version", version=f"ds_ext {ds_ext.__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # of the launcher ``deepspeed``
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {}
    for name, command in COMMANDS.items():
        first = command.DESCRIPTION.partition(". ")[0]
        own = commands.add_parser(name, help=first, description=command.DESCRIPTION)
        command.add_options(own)
        what = "a Python module that registers optimizers of yours; may be given several times"
        several: Any = {"dest": "imports", "action": "append", "default": []}
        own.add_argument("--import", metavar="MODULE", help=what, **several)
        parsers[name] = own
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        whose = parsers.get(options.command, parser)
        whose.error(_unknown(unknown, whose))
    if options.command is None:
        parser.print_help()
        return 0
    try:
        for name in options.imports:
            _import(name)
        return int(COMMANDS[options.command].run(options) or 0)
    except ValueError as error:
        parsers[options.command].error(str(error))
