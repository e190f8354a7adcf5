"""Problems of a weights file, or between one and a model."""

from collections.abc import Sequence
from typing import NamedTuple

from polaformer.errors import DataError


class Misfits(NamedTuple):
    """Why a state dict, already under the model's names, cannot be loaded."""

    missing: list[str]  # names in the model but not in the state dict
    unexpected: list[str]  # names in the state dict but not in the model
    different: list[str]  # "name has shape … in the file but … in the model"


class WeightsError(DataError):
    """A weights file cannot be read or does not fit; the message says why and what to do. Nothing was loaded.

    misfits: for a file that does not fit, the names that the message lists, by kind.
    """

    def __init__(self, message: str | Sequence[str], misfits: Misfits | None = None) -> None:
        super().__init__(*([message] if isinstance(message, str) else message))
        self.misfits = misfits
