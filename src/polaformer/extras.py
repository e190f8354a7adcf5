"""Checks for the packages of optional extras."""

from importlib.util import find_spec

from polaformer.errors import MissingExtraError


def require(extra: str, *packages: str) -> None:
    """Raises MissingExtraError unless all `packages`, which polaformer[extra] installs, can be imported.

    Imports nothing, so it can be called before any work starts.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtraError(f'{" and ".join(missing)} not installed; run: pip install "polaformer[{extra}]"')
