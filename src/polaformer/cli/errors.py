"""Errors that end a command with one line and an exit code instead of a traceback."""

from polaformer import errors

INCORRECT, USAGE, BAD_DATA, DIVERGED, CANNOT_WRITE, NOISY, INTERRUPTED = 1, 2, 65, 70, 74, 75, 130


class CommandError(Exception):
    """Ends the command; the message states where, what was given, what is allowed, and what to do."""

    exit_code = INCORRECT

    def __init__(self, message: str) -> None:
        super().__init__(errors.printable(message))


class UsageError(CommandError):
    """The options are invalid."""

    exit_code = USAGE


# Errors of the library that a user can fix, and their exit codes.
CODES: dict[type[Exception], int] = {
    errors.SettingsError: USAGE,
    errors.DataError: BAD_DATA,
    errors.DivergedError: DIVERGED,
    errors.CannotWriteError: CANNOT_WRITE,
}
EXPECTED: tuple[type[Exception], ...] = (CommandError, errors.StoppedError, errors.MissingExtraError, *CODES)


def exit_code(error: Exception) -> int:
    """The exit code of an expected error; for a signal, 128 plus its number, as in shells."""
    if isinstance(error, CommandError):
        return error.exit_code
    if isinstance(error, errors.StoppedError):
        return 128 + error.number
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), USAGE)
