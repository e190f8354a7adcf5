"""A segmenter that a CPU can train on CamVid: narrow, on small images.

Fields of `SegmentationRecipe`: the nano recipe has them, and `polaformer models` counts it. Needs no PyTorch.
"""

from typing import Any

from polaformer.tasks.dense.narrow import NARROW_PVT

NUM_CLASSES = 11
SEMANTIC_FPN: dict[str, Any] = {
    "segmenter": "semantic-fpn",
    **NARROW_PVT,
    "fpn_width": 64,
    "head_width": 64,
    "crop_size": 256,
    "base_size": (360, 480),
    "eval_size": 360,
    "eval_max_size": 480,
}
