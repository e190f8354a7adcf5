"""Runs `polaformer sweep`, or `table lra --run`, in a separate process that forks its runs instead of starting them.

So PyTorch loads once.
"""

import os
import signal
import subprocess
import sys
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults

SMALL = "epochs = 1\nwarmup_epochs = 0\ndepths = [1]\ndims = [16]\nnum_workers = 0\nsave_every = 4\n"
TWO_CELLS = f"""
seeds = [0, 1]
[options]
{SMALL}
[[cell]]
name = "pola"
recipe = "digits/pola-vit-tiny"
[[cell]]
name = "softmax"
recipe = "digits/pola-vit-tiny"
seeds = [0]
options = {{ attention = "softmax" }}
"""
ONE_CELL = f'seeds = [0]\n[options]\n{SMALL}\n[[cell]]\nname = "pola"\nrecipe = "digits/pola-vit-tiny"\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def start(words: list[Any], folder: Path, command: tuple[str, ...] = ("sweep",)) -> BaseProcess:
    """Starts `polaformer sweep` with these arguments; its stdout and stderr go to files in the folder."""
    return faults.spawn(_sweep, [*command, *map(str, words)], folder / "stdout", folder / "stderr")


def run(words: list[Any], folder: Path, command: tuple[str, ...] = ("sweep",)) -> tuple[int, str, str]:
    """Runs it to the end; returns the exit code, stdout and stderr."""
    process = start(words, folder, command)
    process.join(120)
    assert process.exitcode is not None, "it did not end within two minutes"
    return process.exitcode, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def _sweep(words: list[str], stdout: Path, stderr: Path) -> None:
    from polaformer.cli import sweep_training
    from polaformer.cli.main import main

    faults.become(0, 1, 0)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    forking = partial(subprocess.Popen, preexec_fn=_train)
    sweep_training.subprocess = SimpleNamespace(Popen=forking, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    sys.exit(main(words))


def _train() -> None:
    """Does what the program would do that Popen is about to start, with only its three streams left open."""
    from polaformer.cli import sweep_run

    os.closerange(3, 1024)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every program of Python
    sweep_run.report_run = lambda *results, **options: None  # type: ignore[assignment]  # takes longer than these trainings
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    code = 1
    try:
        code = sweep_run.main()
    finally:
        sys.stdout.flush()
        os._exit(code)
