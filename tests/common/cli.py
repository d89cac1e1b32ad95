"""The command line, called in this process."""

import pytest

from ds_ext.commands.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs ``python -m ds_ext ARGUMENTS``, which must fail -> what it prints to stderr.

    The exit status must be 2, and nothing may be printed to stdout.
    """
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    return printed.err
