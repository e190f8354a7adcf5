"""The command line, run inside the tests' own process."""

from typing import Any

import pytest

from polaformer.cli.main import main


def run(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, and what was printed on stdout and stderr."""
    try:
        code: Any = main([str(argument) for argument in arguments])
    except SystemExit as stop:  # how the parser ends
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err
