"""Errors that a user can fix. Each message says where, what was given, what is allowed, and what to do."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from os import PathLike


def printable(name: str | PathLike[str]) -> str:
    """A path, or a name from a file, as one line that is safe to print and to put into JSON.

    Escape sequences, other control characters and changes of writing direction, which a terminal would obey, are escaped.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(name))


class DataError(ValueError):
    """A given file or folder is damaged or of the wrong kind; names in the message cannot start new lines."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(printable(line) for line in lines))


class SampleError(DataError):
    """One sample is unusable; the others are not affected."""


class ImageError(SampleError):
    """One image is unusable."""


def nearest(word: str, names: Iterable[str]) -> str:
    """ "did you mean …? ", for a message, or "" if no name is similar."""
    near = get_close_matches(word, list(names), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


class SettingsError(ValueError):
    """A configuration is invalid; the error lists all its problems, not only the first."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [printable(one) for one in ([problems] if isinstance(problems, str) else problems)]
        many = f"{len(self.problems)} problems, and nothing was started:\n  "
        super().__init__(self.problems[0] if len(self.problems) == 1 else many + "\n  ".join(self.problems))


def raise_all(problems: Sequence[str], checks: Iterable[Callable[[], object]] = ()) -> None:
    """Raises one SettingsError that lists `problems` and those that the checks raise; returns if there are none."""
    found = list(problems)
    for check in checks:
        try:
            check()
        except SettingsError as error:
            found += error.problems
    if found:
        raise SettingsError(found)


class CannotWriteError(OSError):
    """A result cannot be written; existing files are left intact."""


class DivergedError(RuntimeError):
    """Training met a non-finite loss or gradient, and stopped before using it."""


class StoppedError(Exception):
    """A signal asked training to stop, and it has saved its state."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class MissingExtraError(ImportError):
    """A package of an optional extra is not installed; the message gives the command that installs it."""
