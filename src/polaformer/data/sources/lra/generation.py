"""What generators of data share: parts made by several processes, and a directory in which a killed generator resumes.

A part depends only on the seed and on its own number, so that neither the number of processes nor a kill changes the result.
"""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from polaformer.errors import DataError, SettingsError, StoppedError
from polaformer.regular_files import LOCK, locked, read_regular, reason, write_atomically, writing

FORMAT = "polaformer-generated-1"
MANIFEST = "manifest.json"  # written last: it says that the data are complete, and how they were made
STATE = ".generating.json"  # exists until then

Part = TypeVar("Part")
Progress = Callable[[int, int], object]  # to be called with what is done and what there is to do
BeginStage = Callable[[str], Progress]  # to be called as a stage begins, with its name


def ignore(name: str) -> Progress:
    """A stage that reports no progress."""
    return lambda done, total: None


class Target:
    """The directory of a generator, opened by `opening`."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.manifest: dict[str, Any] | None = None  # of data that are already complete
        self.progress: dict[str, Any] = {}  # what was saved last

    def save(self, progress: dict[str, Any]) -> None:
        """Saves the generator's progress."""
        self.progress = progress
        write_atomically(self.folder / STATE, _encode({"about": self.about, "progress": progress}))

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Writes the manifest, and returns it: the data are complete."""
        self.manifest = {"format": FORMAT, **result, "about": self.about}
        write_atomically(self.folder / MANIFEST, _encode(self.manifest))
        (self.folder / STATE).unlink()
        return self.manifest


@contextmanager
def opening(folder: Path, about: dict[str, Any], outputs: Sequence[str], *, overwrite: bool = False) -> Iterator[Target]:
    """Locks a directory for data that `about` describes; if it has some of them, the generator resumes.

    outputs: patterns of the files and folders that the generator writes. With `overwrite`, data generated another way are
    removed; without, and for anything else in the directory, it raises SettingsError.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "generated"):
            target = Target(folder, json.loads(_encode(about)))
            there = _read(folder)
            if there is not None and there["about"] != target.about:
                _remove_other(folder, there["about"], target.about, outputs, overwrite=overwrite)
                there = None
            if there is None:
                target.save({})
            elif "progress" in there:
                target.progress = there["progress"]
            else:
                target.manifest = there
            yield target


def in_processes(make: Callable[[int], Part], numbers: Iterable[int], num_workers: int) -> Iterator[Part]:
    """make(number) for all numbers, in their order, by several processes. The numbers may be endless.

    The processes import the program that calls this; its own work must be below `if __name__ == "__main__"`.
    """
    if num_workers == 1:
        yield from map(make, numbers)
        return
    context = multiprocessing.get_context("spawn")  # this process may have threads, which a fork would not copy
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_prepare_worker)
    pending: deque[Future[Part]] = deque()
    try:
        for number in numbers:
            pending.append(pool.submit(make, number))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise StoppedError("a worker process was killed; the same command resumes", signal.SIGKILL) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers through the process that started them
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent has been killed; otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read(folder: Path) -> dict[str, Any] | None:
    """The state or else the manifest in the directory; None if it is empty."""
    name = next((name for name in (STATE, MANIFEST) if os.path.lexists(folder / name)), None)
    if name is None:
        if {entry.name for entry in folder.iterdir()} - {LOCK, f".{STATE}.tmp"}:
            raise SettingsError(f"{folder} is not empty, and was not generated; give another directory with --out")
        return None
    try:
        found = json.loads(read_regular(folder / name))
        is_valid = isinstance(found, dict) and isinstance(found.get("about"), dict)
        if not is_valid or (name == MANIFEST and found.get("format") != FORMAT):
            raise ValueError("it does not say how the data were generated")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder / name} is damaged: {reason(error)}; give another directory with --out") from error


def _remove_other(
    folder: Path, there: dict[str, Any], wanted: dict[str, Any], outputs: Sequence[str], *, overwrite: bool
) -> None:
    if not overwrite:
        differing = [name for name in {**there, **wanted} if there.get(name) != wanted.get(name)]
        has = ", ".join(f"{name} {there.get(name)}" for name in differing) if there else "removed in part"
        raise SettingsError(
            f"{folder} has other data ({has}); give the same options to resume, another directory with --out, or --overwrite"
        )
    # A kill from here on leaves data that no options match.
    write_atomically(folder / STATE, _encode({"about": {}, "progress": {}}))
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in [path for pattern in outputs for path in folder.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _encode(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"
