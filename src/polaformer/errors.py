"""What can go wrong in a way that a user can mend. Each message says where, what was given, what is allowed, and what to do."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from os import PathLike


def shown(name: str | PathLike[str]) -> str:
    """A path or a name out of a file as one line that can be printed and put into JSON, whatever characters it has.

    What a terminal would obey (escape sequences, other control characters, changes of the direction of writing) is spelled out.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(name))


class DataError(ValueError):
    """A file or folder that was given is damaged, or not what it should be; names in the message cannot begin new lines."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(shown(line) for line in lines))


class SampleError(DataError):
    """One sample cannot be used; the others can."""


class ImageError(SampleError):
    """One image cannot be used."""


def nearest(word: str, names: Iterable[str]) -> str:
    """ "did you mean …? ", for a message, or nothing."""
    near = get_close_matches(word, list(names), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


class SettingsError(ValueError):
    """A configuration that makes no sense; holds everything that is wrong with it, not only the first thing."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [shown(one) for one in ([problems] if isinstance(problems, str) else problems)]
        many = f"{len(self.problems)} problems, and nothing was started:\n  "
        super().__init__(self.problems[0] if len(self.problems) == 1 else many + "\n  ".join(self.problems))


def raise_all(problems: Sequence[str], checks: Iterable[Callable[[], object]] = ()) -> None:
    """Raises one SettingsError with all that is wrong, if anything is: the problems, and what the checks raise."""
    found = list(problems)
    for check in checks:
        try:
            check()
        except SettingsError as error:
            found += error.problems
    if found:
        raise SettingsError(found)


class CannotWriteError(OSError):
    """A result cannot be written; what was there before is still there."""


class DivergedError(RuntimeError):
    """Training met a loss or gradient that is not finite, and stopped before using it."""


class StoppedError(Exception):
    """Training was asked to stop by a signal, and has saved its state."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class MissingExtraError(ImportError):
    """A package of an optional extra is not installed; the message holds the command that installs it."""
