"""`polaformer check`: find the problems in a dataset before training does."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from polaformer.cli.command import REQUIRED, DynamicCommand
from polaformer.cli.errors import BAD_DATA, UsageError
from polaformer.cli.options import parse, peek_option, positional_arguments, print_help, wants_help
from polaformer.cli.output import load, new_table, print_all, print_json, progress_bar
from polaformer.errors import CannotWriteError, printable
from polaformer.regular_files import writing
from polaformer.tasks.recipe import POSITIONAL
from polaformer.tasks.registry import DEFAULT, find_task, tasks
from polaformer.tasks.task import Advance, Audit, CheckOptions, Task

MAX_LINES = 50
PROGRAM = "polaformer check"


@dataclass(frozen=True)
class Check(DynamicCommand):
    """Read a whole dataset and list its problems.

    Finds unreadable samples; the same content in two splits or under two labels; mistakes in COCO annotations; and, given a
    manifest, files that have changed. The exit code is 65 if there are problems.

    Example: polaformer check photos

    Example: polaformer check photos --write-manifest photos.json
    """

    inputs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="DATA", help_behavior_hint=REQUIRED)]] = (
        field(default=(), metadata=POSITIONAL)
    )
    """The data, as for train: an image folder, .tar, .npz, hfds:FOLDER, digits, IMAGES:MASKS, COCO, or Long Range Arena."""
    task: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The task that the data are for; detected if not given."""
    manifest: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Compare every sample with its digest in this file."""
    write_manifest: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the digest of every sample to this file."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def problems(self) -> list[str]:
        """All problems with the options, one string each."""
        names = ", ".join(self.inputs)
        found = [] if len(self.inputs) == 1 else [f"several datasets given ({names}); name one, as in: {PROGRAM} photos"]
        if self.manifest is not None and not os.path.isfile(self.manifest):
            found.append(f"there is no manifest {self.manifest}; write one with --write-manifest {self.manifest}")
        if self.write_manifest is not None and os.path.lexists(self.write_manifest):
            found.append(f"{self.write_manifest} exists; give another name, or compare with --manifest {self.write_manifest}")
        return found

    @classmethod
    def run_arguments(cls, arguments: Sequence[str]) -> int:
        """Checks the dataset; the available options depend on the task."""
        if wants_help(arguments):
            task = find_task(peek_option("task", arguments) or DEFAULT)
            return print_help(PROGRAM, cls.__doc__ or "", cls(), task.checking())
        data = positional_arguments(arguments, cls(), *(task.checking() for task in tasks().found.values()))
        if not data:
            raise UsageError(f"no data given; name the dataset, as in: {PROGRAM} photos")
        task = _task_of(data[0], peek_option("task", arguments))
        command, options = parse(arguments, cls(), task.checking(), program=PROGRAM)
        return command.run(task, options)

    def run(self, task: Task, options: CheckOptions) -> int:
        """Reads everything and prints the problems."""
        target = self.write_manifest
        if target is not None and not os.path.isdir(target.parent):
            raise CannotWriteError(
                f"cannot write to {target}: there is no directory {target.parent}; create it, or give another name"
            )
        load("polaformer.data.audit")
        from polaformer.data.audit import read_manifest, write_manifest

        known = None if self.manifest is None else read_manifest(self.manifest)
        with ExitStack() as stack:

            def begin(number: int) -> Advance:
                bar = stack.enter_context(progress_bar())
                shown = bar.add_task(f"reading {task.recipe.terms.sample_noun}", total=number)
                return lambda: bar.advance(shown)

            audit = task.check(self.inputs[0], options, known, begin)
        if target is not None:
            with writing(target):
                write_manifest(target, audit.digests)
        self._report(audit)
        return BAD_DATA if audit.problems else 0

    def _report(self, audit: Audit) -> None:
        if self.json:
            print_json({"command": "check", "data": self.inputs[0], "parts": audit.parts, "problems": audit.problems})
            return
        columns = list(dict.fromkeys(name for facts in audit.parts.values() for name in facts))
        table = new_table(self.inputs[0], "split", *(name.replace("_", " ") for name in columns))
        for name, facts in audit.parts.items():
            table.add_row(name, *(str(facts.get(column, "")) for column in columns))
        lines = [printable(", ".join(list(problem.values())[:-1]) + f": {problem['text']}") for problem in audit.problems]
        more = [f"… and {len(lines) - MAX_LINES} more; --json lists them all"] if len(lines) > MAX_LINES else []
        summary = f"{len(lines)} problem{'s' * (len(lines) != 1)}" if lines else "no problems found"
        print_all(table, *lines[:MAX_LINES], *more, summary)


def _task_of(data: str, name: str | None) -> Task:
    """The task of that name, or the first one that recognises the data; classification, which takes any data, comes last."""
    if name is not None:
        return find_task(name)
    in_order = sorted(tasks().found.values(), key=lambda task: task.name == DEFAULT)
    return next(task for task in in_order if task.reads(data))
