"""``python -m ds_ext``: the command line."""

import os
import sys
from pathlib import Path

from ds_ext.commands.cli import main


def separate_build_folder() -> None:
    """Makes DeepSpeed build its operations in a folder of this Python environment.

    Environments that share torch's default folder rebuild them at each change, and wait for a lock
    that a killed build has left. Changes nothing if TORCH_EXTENSIONS_DIR is set, outside of an
    environment, or if the environment is not writable.
    """
    prefix = Path(sys.prefix)
    is_environment = sys.prefix != sys.base_prefix or (prefix / "conda-meta").is_dir()
    if is_environment and os.access(prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(prefix / "torch_extensions"))


if __name__ == "__main__":
    separate_build_folder()
    code = 1
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # what reads the output has ended, such as "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
