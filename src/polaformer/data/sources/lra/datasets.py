"""The five datasets of the Long Range Arena as the published models read them. Needs no PyTorch."""

from dataclasses import dataclass
from typing import Literal

DatasetName = Literal["listops", "text", "retrieval", "pathfinder", "image"]
SIDE = 32  # pixels of an image along a side


@dataclass(frozen=True)
class DatasetSpec:
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
    has_closers: bool = False  # its documents are expressions with closing brackets
    is_text: bool = False  # its symbols are bytes of UTF-8


DIGITS = tuple("0123456789")
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DATASETS: dict[DatasetName, DatasetSpec] = {
    one.name: one
    for one in (
        DatasetSpec("listops", DIGITS, vocabulary=32, kept=2000, length=2048, has_closers=True),
        DatasetSpec("text", ("negative", "positive"), vocabulary=512, kept=4000, length=4096, is_text=True),
        DatasetSpec(
            "retrieval", ("unrelated", "linked"), vocabulary=512, kept=4000, length=4096, num_documents=2, is_text=True
        ),
        DatasetSpec("pathfinder", ("apart", "connected"), vocabulary=512, kept=1024, length=1024, shift=0, side=SIDE),
        DatasetSpec("image", CIFAR, vocabulary=256, kept=1024, length=1024, shift=0, side=SIDE),
    )
}
