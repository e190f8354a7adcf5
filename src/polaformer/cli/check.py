"""`polaformer check`: what is wrong with a data set, before a training finds out."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polaformer.cli.errors import BAD_DATA, UsageError, WriteError
from polaformer.cli.output import load, new_table, print_all, print_json, progress_bar, writing
from polaformer.errors import shown

if TYPE_CHECKING:
    from polaformer.data.checking import Report

MOST_LINES, MOST_WORKERS = 50, 256


@dataclass(frozen=True)
class Check:
    """Read every image of a data set and list what is wrong.

    Finds images that are damaged, cut short, no images, or too large; the same image in training and validation, or under two
    classes; and, against a manifest that was written before, files that have changed. Exit code 65 if anything is wrong.

    Example: polaformer check photos

    Example: polaformer check photos --write-manifest photos.json
    """

    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """The data, as for train: a folder, a .tar, an .npz, hfds:FOLDER, or digits."""
    manifest: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Compare every image with the digests in this file."""
    write_manifest: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the digest of every image into this file."""
    val_share: float = 0.1
    """Share that is held out where the data have no validation part; as in training."""
    num_workers: int = 2
    """Threads that read images."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Reads everything and prints what is wrong."""
        self._check_options()
        load("polaformer.data.checking")
        from polaformer.data.checking import check, read_manifest, write_manifest
        from polaformer.data.sources import open_data

        known = None if self.manifest is None else read_manifest(self.manifest)
        data = open_data(self.data, val_share=self.val_share)
        with progress_bar() as bar:
            task = bar.add_task("reading images", total=len(data.train) + len(data.val))
            report = check(data, known, num_workers=self.num_workers, advance=lambda: bar.advance(task))
        if self.write_manifest is not None:
            with writing(str(self.write_manifest)):
                write_manifest(self.write_manifest, report.digests)
        self._report(report)
        return BAD_DATA if report.problems else 0

    def _check_options(self) -> None:
        if not 1 <= self.num_workers <= MOST_WORKERS:
            raise UsageError(f"--num-workers is {self.num_workers}; give a whole number from 1 to {MOST_WORKERS}")
        if not 0 <= self.val_share < 1:
            raise UsageError(f"--val-share is {self.val_share}; give at least 0 and below 1")
        if self.manifest is not None and not os.path.isfile(self.manifest):
            raise UsageError(f"there is no manifest {self.manifest}; write one with --write-manifest {self.manifest}")
        target = self.write_manifest
        if target is not None and os.path.lexists(target):
            raise UsageError(f"{target} exists; give another name, or compare with --manifest {target}")
        if target is not None and not os.path.isdir(target.parent):
            raise WriteError(f"cannot write to {target}: there is no folder {target.parent}; make it, or give another name")

    def _report(self, report: "Report") -> None:
        if self.json:
            problems = [problem._asdict() for problem in report.problems]
            print_json({"command": "check", "data": self.data, "parts": report.parts, "problems": problems})
            return
        table = new_table(self.data, "part", "images", "classes", "smallest class", "largest class", "image sizes")
        for name, part in report.parts.items():
            table.add_row(name, *(str(value) for value in part.values()))
        lines = [shown(f"{problem.part}, {problem.image}: {problem.text}") for problem in report.problems]
        more = [f"… and {len(lines) - MOST_LINES} more; --json lists them all"] if len(lines) > MOST_LINES else []
        found = f"{len(lines)} problem{'s' * (len(lines) != 1)}" if lines else "nothing is wrong"
        print_all(table, *lines[:MOST_LINES], *more, found)
