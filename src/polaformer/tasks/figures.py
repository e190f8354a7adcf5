"""What a task wants to be seen in the report of a run: data only. `polaformer.analysis` draws it.

# K classes, C channels
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Rows:
    """A table, and a line below it."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    caption: str = ""


@dataclass(frozen=True)
class Confusion:
    """How often each class (row) was taken for each (column), (K, K)."""

    counts: Tensor
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """An image, (C, height, width) between 0 and 1, and what a classifier says it is."""

    image: Tensor
    true: str
    predicted: str
    probability: float
    is_right: bool

    def __str__(self) -> str:
        return f"{self.true} → {self.predicted} ({100 * self.probability:.0f} %)"


@dataclass(frozen=True)
class Predictions:
    """Images with what they are and what the model says; the wrong ones first, looked for among `searched` images."""

    samples: Sequence[Sample]
    searched: int
    most_wrong: int


@dataclass(frozen=True)
class AttentionOn:
    """A model, and images (C, height, width) that its attention is looked at on; shown: the first of them, between 0 and 1."""

    model: nn.Module
    images: list[Tensor]
    shown: Tensor


Figure = Text | Rows | Confusion | Predictions | AttentionOn
