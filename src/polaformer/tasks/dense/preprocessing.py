"""How an image becomes the input of a detector or segmenter."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from polaformer.ops.grid import Grid


@dataclass(frozen=True)
class DensePreprocessing:
    """The lengths of the sides of an image in pixels, and the normalisation. size: of the shorter side; None: as it is."""

    size: int | None
    max_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`, from JSON; raises TypeError and KeyError for anything else."""
        return cls(**{**values, **{name: tuple(values[name]) for name in ("mean", "std")}})

    def with_size(self, size: int | None) -> Self:
        """The same with another length of the shorter side, the longer one in proportion; None changes nothing."""
        if size is None:
            return self
        longest = self.max_size if self.size is None else round(self.max_size * size / self.size)
        return replace(self, size=size, max_size=max(longest, size))

    def largest_size(self, *, multiple: int = 1, mixed: bool = False) -> Grid:
        """The largest (height, width) of a batch whose sides become multiples; mixed: of tall and wide images together.

        For images as they are: of those with the longest sides.
        """
        sides = self.max_size if self.size is None or mixed else self.size, self.max_size
        height, width = (-(-side // multiple) * multiple for side in sides)
        return height, width

    def about(self) -> dict[str, Any]:
        """The sizes for tables and JSON."""
        return {"shorter_side": self.size or "as it is", "longer_side_at_most": self.max_size}
