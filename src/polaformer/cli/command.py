"""What a command is: a frozen dataclass of options whose docstrings are its help."""

from collections.abc import Sequence
from typing import Protocol

REQUIRED = "(required)"  # shown in the help instead of the default of an argument whose absence a command reports itself


class Command(Protocol):
    """A command whose options are always the same; `tyro` parses them."""

    def run(self) -> int:
        """Runs the command and returns the exit code."""
        ...


class DynamicCommand:
    """A command whose options depend on a recipe or a task; it parses its arguments itself."""

    def problems(self) -> list[str]:
        """All problems with the options, one string each."""
        return []

    @classmethod
    def run_arguments(cls, arguments: Sequence[str]) -> int:
        """Parses the arguments, runs the command and returns the exit code."""
        raise NotImplementedError
