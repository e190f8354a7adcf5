"""Detectors that a CPU can train: narrow, on small images, with anchors that are small relative to their level.

Fields of `DetectionRecipe`: the nano recipes have them, and `polaformer models` counts them. Needs no PyTorch.
"""

from typing import Any

from polaformer.tasks.dense.narrow import NARROW_PVT

RETINANET: dict[str, Any] = {
    "detector": "retinanet",
    **NARROW_PVT,
    "fpn_width": 64,
    "anchor_scale": 2.0,
    "sizes": (224, 256, 288),
    "eval_size": 256,
    "max_size": 480,
}
MASK_RCNN: dict[str, Any] = RETINANET | {
    "detector": "mask-rcnn",
    "anchor_scale": 4.0,
    "box_width": 256,
    "mask_width": 64,
    "num_samples": 128,
    "num_proposals": 300,
}
