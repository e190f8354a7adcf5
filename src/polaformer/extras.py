"""What to install for the parts that need more than the core library."""

from importlib.util import find_spec

from polaformer.errors import MissingExtraError


def require(extra: str, *packages: str) -> None:
    """Raises MissingExtraError unless every one of `packages`, which polaformer[extra] brings, can be imported.

    Imports nothing, so it can be asked before any work starts.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtraError(f'{" and ".join(missing)} not installed; run: pip install "polaformer[{extra}]"')
