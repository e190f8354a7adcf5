"""What is wrong with a weights file, or between one and a model."""

from collections.abc import Sequence
from typing import NamedTuple

from polaformer.errors import DataError


class Misfits(NamedTuple):
    """What keeps a state dict under the model's names from being loaded."""

    missing: list[str]  # names that the model has and the state dict has not
    unexpected: list[str]  # the other way round
    different: list[str]  # "name has shape … in the file but … in the model"


class WeightsError(DataError):
    """A weights file cannot be read or does not fit; the message says what is wrong and what to do. Nothing was loaded.

    misfits: for one that does not fit, the names that the message lists, by kind.
    """

    def __init__(self, message: str | Sequence[str], misfits: Misfits | None = None) -> None:
        super().__init__(*([message] if isinstance(message, str) else message))
        self.misfits = misfits
