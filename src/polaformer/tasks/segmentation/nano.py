"""Segmenters that a CPU can train on CamVid: on small images, and a narrow one.

Fields of `SegmentationRecipe`: the CamVid recipes have them, and `polaformer models` counts the narrow one. Needs no PyTorch.
"""

from typing import Any

from polaformer.tasks.dense.narrow import NARROW_PVT

NUM_CLASSES = 11
IMAGES: dict[str, Any] = {
    "segmenter": "semantic-fpn",
    "crop_size": 256,
    "base_size": (360, 480),
    "eval_size": 360,
    "eval_max_size": 480,
}
SEMANTIC_FPN: dict[str, Any] = IMAGES | NARROW_PVT | {"fpn_width": 64, "head_width": 64}
