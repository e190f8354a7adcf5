"""The paper's table of COCO. Needs no PyTorch."""

from typing import NamedTuple

from polaformer.tasks.detection.detector_facts import DetectorName


class CocoRow(NamedTuple):
    """A row of the paper's table: AP of boxes and of masks, in %."""

    detector: DetectorName
    model: str
    schedule: int  # in units of 12 epochs
    box_ap: float
    mask_ap: float | None = None


ROWS = (
    CocoRow("retinanet", "pola_pvt_tiny", 1, 39.5),
    CocoRow("retinanet", "pola_pvt_small", 1, 43.2),
    CocoRow("mask-rcnn", "pola_pvt_tiny", 1, 40.4, 37.4),
    CocoRow("mask-rcnn", "pola_pvt_small", 1, 43.9, 40.2),
    CocoRow("mask-rcnn", "pola_swin_tiny", 1, 44.8, 40.5),
    CocoRow("mask-rcnn", "pola_swin_tiny", 3, 47.0, 42.3),
    CocoRow("cascade-mask-rcnn", "pola_swin_tiny", 3, 51.1, 44.4),
)
