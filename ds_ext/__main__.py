"""``python -m ds_ext``: the command line."""

import sys

from ds_ext.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
