"""Mistakes that end a command with one line and an exit code instead of a traceback."""

INCORRECT, USAGE, BAD_DATA, CANNOT_WRITE, INTERRUPTED = 1, 2, 65, 74, 130


class CommandError(Exception):
    """Ends the command; the message says where, what was given, what is allowed, and what to do."""

    exit_code = INCORRECT


class UsageError(CommandError):
    """The options do not make sense."""

    exit_code = USAGE


class DataError(CommandError):
    """A file that was given is damaged or not what it should be."""

    exit_code = BAD_DATA


class WriteError(CommandError):
    """The results cannot be written."""

    exit_code = CANNOT_WRITE
