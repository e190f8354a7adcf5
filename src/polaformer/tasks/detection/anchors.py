"""Anchors as in mmdetection, on torchvision's generator and matcher.

# A anchors of an image, m objects
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList

from polaformer.ops.grid import Grid
from polaformer.ops.precision import computing_dtype

RATIOS = (0.5, 1.0, 2.0)  # height / width


class Anchors(AnchorGenerator):
    """Anchors of side scale · stride, in every ratio and scale, around the top left corner of every cell of every level.

    torchvision's would have sides rounded to whole pixels, and strides that shrink where a level's size does not divide the
    image's: 61 instead of 64 for P6 of 800 pixels.
    """

    def __init__(self, strides: Sequence[int], scales: Sequence[float], ratios: Sequence[float] = RATIOS) -> None:
        self.strides = tuple(strides)
        super().__init__(
            tuple(tuple(stride * scale for scale in scales) for stride in strides), (tuple(ratios),) * len(strides)
        )

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """(ratios · scales, 4): boxes around the origin, ratio by ratio."""
        sides = torch.as_tensor(scales, dtype=dtype, device=device)
        roots = torch.as_tensor(aspect_ratios, dtype=dtype, device=device).sqrt()
        widths, heights = (sides / roots[:, None]).flatten(), (sides * roots[:, None]).flatten()
        return torch.stack([-widths, -heights, widths, heights], dim=1) / 2

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """For each image (A, 4), level by level, row by row."""
        self.set_cell_anchors(computing_dtype(feature_maps[0]), feature_maps[0].device)
        sizes = [list(one.shape[-2:]) for one in feature_maps]
        anchors = torch.cat(self.grid_anchors(sizes, [[stride, stride] for stride in self.strides]))
        return [anchors] * len(image_list.image_sizes)


class ObjectMatcher(Matcher):
    """torchvision's matcher, but a low-quality match needs an IoU of at least `least`.

    torchvision's matches an object that overlaps no anchor with every anchor, at an IoU of 0.
    """

    def __init__(self, foreground: float, background: float, least: float = 0.0) -> None:
        super().__init__(foreground, background, allow_low_quality_matches=True)
        self.least = least

    def set_low_quality_matches_(self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor) -> None:
        """Match the best anchors of every object, in place; match_quality_matrix (m, A)."""
        best = match_quality_matrix.amax(dim=1, keepdim=True)
        is_best = (match_quality_matrix == best) & (best > 0) & (best >= self.least)
        chosen = is_best.any(dim=0)
        matches[chosen] = all_matches[chosen]


def ignored_anchors(anchors: Tensor, size: Grid, use: str) -> Tensor:
    """(A,), True for anchors (A, 4) that are ignored in an image of the given size.

    use: "valid": those centred in the padding. "inside": those that reach beyond the image's border. "all": none.
    """
    limit = anchors.new_tensor([size[1], size[0]])
    if use == "inside":
        return ((anchors[:, :2] < 0) | (anchors[:, 2:] >= limit)).any(dim=1)
    if use == "valid":
        return ((anchors[:, :2] + anchors[:, 2:]) / 2 >= limit).any(dim=1)
    return anchors.new_zeros(len(anchors), dtype=torch.bool)


def in_padding(anchors: Sequence[Tensor], sizes: Sequence[Grid], use: str) -> Tensor:
    """(B, A), True for anchors centred in the padding, which predict nothing; use: as there, "all" hides none."""
    kind = "all" if use == "all" else "valid"
    return torch.stack([ignored_anchors(own, size, kind) for own, size in zip(anchors, sizes, strict=True)])


def image_list(images: Tensor, sizes: Sequence[Grid]) -> ImageList:
    """A batch as torchvision's anchor generators take it."""
    return ImageList(images, list(sizes))
