"""The command line, run inside the test process, or in processes forked from one that has loaded PyTorch."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import faults
from polaformer.cli.main import main


def run(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, and the output on stdout and stderr."""
    try:
        code: Any = main([str(argument) for argument in arguments])
    except SystemExit as stop:  # raised by the parser
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_apart(
    arguments: list[Any], folder: Path, *, stdout: Path | None = None, processes: int = 1
) -> list[tuple[int, str, str]]:
    """The same for separate processes: one, or several that form a group as under torchrun.

    stdout: where to print; if not given, the output is read and returned.
    """
    words, port = [str(argument) for argument in arguments], faults.free_port()
    files = [(stdout or folder / f"stdout-{rank}", folder / f"stderr-{rank}") for rank in range(processes)]
    started = [faults.spawn(_main, words, rank, processes, port, *files[rank]) for rank in range(processes)]
    for process in started:
        process.join(60)
        assert process.exitcode is not None, "a process did not end within a minute"
    texts = [("" if stdout else out.read_text(), err.read_text()) for out, err in files]
    return [(process.exitcode or 0, *text) for process, text in zip(started, texts, strict=True)]


def _main(words: list[str], rank: int, processes: int, port: int, stdout: Path, stderr: Path) -> None:
    faults.become(rank, processes, port)
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), stream.fileno())
    sys.exit(main(words))
