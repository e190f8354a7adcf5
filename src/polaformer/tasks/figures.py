"""What a task adds to the report of a run, as data only. `polaformer.analysis` draws it.

# K classes, C channels
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL.Image import Image
from torch import Tensor, nn


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Rows:
    """A table with a caption below it. numeric: all columns but the first are numbers."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    caption: str = ""
    numeric: bool = False


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix (K, K): true classes in rows, predicted classes in columns. split: None means validation.

    parts: what is counted, plural, if these are parts of the samples, such as pixels; cells then have shares in %, not counts.
    """

    counts: Tensor
    classes: tuple[str, ...]
    split: str | None = None
    parts: str | None = None


@dataclass(frozen=True)
class PredictedImage:
    """An image (C, height, width) with values in [0, 1], its true class and the predicted class."""

    image: Tensor
    true: str
    predicted: str
    probability: float
    is_right: bool

    def __str__(self) -> str:
        return f"{self.true} → {self.predicted} ({100 * self.probability:.0f} %)"


@dataclass(frozen=True)
class Predictions:
    """Images with true and predicted classes, at most `most_wrong` wrong ones first, found among `searched` images."""

    samples: Sequence[PredictedImage]
    searched: int
    most_wrong: int


@dataclass(frozen=True)
class AttentionInputs:
    """A model and images (C, height, width) to map its attention on; shown: the first image, with values in [0, 1]."""

    model: nn.Module
    images: list[Tensor]
    shown: Tensor


@dataclass(frozen=True)
class PictureRow:
    """Pictures to be seen side by side, each with a caption, under a title."""

    title: str
    pictures: tuple[tuple[str, Image], ...]


@dataclass(frozen=True)
class Pictures:
    """Rows of pictures, such as truths and predictions, with a caption below all of them. They are shown in their own size."""

    rows: Sequence[PictureRow]
    caption: str = ""


@dataclass(frozen=True)
class Curves:
    """Lines through points (x, y), by name; a line may be empty. The axes are from 0 to 1 where `unit_square` is set."""

    lines: Mapping[str, Sequence[tuple[float, float]]]
    x_label: str
    y_label: str
    caption: str = ""
    unit_square: bool = False


Figure = Text | Rows | Confusion | Predictions | AttentionInputs | Pictures | Curves


def selection(num_worst: int, which: str, num_random: int) -> str:
    """How many pictures were chosen, and how: those that are worst come first. which: those are the worst."""
    worst = [f"{num_worst} {which}"] * (num_worst > 0)
    return ", then ".join([*worst, f"{num_random} at random"]) if num_random else "".join(worst)
