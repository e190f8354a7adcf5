"""The paper's table of ADE20K. Needs no PyTorch."""

from typing import Literal, NamedTuple

SegmenterName = Literal["semantic-fpn", "upernet"]


class AdeRow(NamedTuple):
    """A row of the paper's table: mean IoU of the validation images, in %."""

    segmenter: SegmenterName
    model: str
    steps: int  # updates
    miou: float


ROWS = (
    AdeRow("semantic-fpn", "pola_pvt_tiny", 40_000, 38.3),
    AdeRow("semantic-fpn", "pola_pvt_small", 40_000, 41.0),
    AdeRow("upernet", "pola_swin_tiny", 160_000, 45.8),
)
# Mean IoU of the same segmenters with other mechanisms, as the paper prints it.
RIVALS: dict[tuple[str, str], float] = {
    ("pola_pvt_tiny", "softmax"): 35.7,
    ("pola_pvt_tiny", "focused"): 37.2,
    ("pola_pvt_small", "softmax"): 39.8,
    ("pola_swin_tiny", "softmax"): 44.5,
    ("pola_swin_tiny", "focused"): 44.8,
}
