"""The five datasets of the Long Range Arena as the published models read them. Needs no PyTorch."""

from dataclasses import dataclass
from typing import Literal

DatasetName = Literal["listops", "text", "retrieval", "pathfinder", "image"]


@dataclass(frozen=True)
class Dataset:
    """How the symbols of a dataset become token ids, and the sizes of its models.

    vocabulary: rows of the embedding table, more than are used. kept: tokens of a document that are read, at most. length: the
    number of positions, to which the published code pads documents. shift: added to a symbol to get its id, so that id 0 is
    padding; 0 for images, where the published code takes black pixels for padding.
    """

    name: DatasetName
    classes: tuple[str, ...]
    vocabulary: int
    kept: int
    length: int
    num_documents: int = 1
    shift: int = 1
    side: int | None = None  # height and width of an image


DIGITS = tuple("0123456789")
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DATASETS: dict[DatasetName, Dataset] = {
    one.name: one
    for one in (
        Dataset("listops", DIGITS, vocabulary=32, kept=2000, length=2048),
        Dataset("text", ("negative", "positive"), vocabulary=512, kept=4000, length=4096),
        Dataset("retrieval", ("unrelated", "linked"), vocabulary=512, kept=4000, length=4096, num_documents=2),
        Dataset("pathfinder", ("apart", "connected"), vocabulary=512, kept=1024, length=1024, shift=0, side=32),
        Dataset("image", CIFAR, vocabulary=256, kept=1024, length=1024, shift=0, side=32),
    )
}
