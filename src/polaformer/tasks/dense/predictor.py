"""The base of trained detectors and segmenters."""

from dataclasses import dataclass
from os import PathLike
from typing import Any

from polaformer.tasks.dense.preprocessing import DensePreprocessing
from polaformer.tasks.dense.trained_model import save_model


@dataclass(frozen=True)
class DensePredictor:
    """A trained model with its description, its class names and the preprocessing of its images."""

    model: Any  # a DenseModel
    description: Any  # a DenseDescription
    classes: tuple[str, ...]
    preprocessing: DensePreprocessing

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the weights file, from which the predictor can be loaded again."""
        raise NotImplementedError(f"{type(self).__name__} does not implement metadata")

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the weights file atomically."""
        save_model(self.model, path, self.metadata)
