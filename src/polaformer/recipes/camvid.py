"""CamVid semantic segmentation, 11 classes of street scenes: small enough to train from scratch on a CPU.

The data are SegNet's version: 367 training, 101 validation and 233 test images of 480×360 pixels; training takes crops of 256
pixels. `camvid/semantic-fpn-pola-pvt-tiny` has the paper's backbone and the published head; the one named nano is narrow, for
more updates in the same time. The former took 37 minutes of a core; of the latter 600 updates took 8. For the softmax twins
override `attention`: --attention softmax. docs/results.md has runs.
"""

from typing import Any

from polaformer.recipes.dense import NANO
from polaformer.tasks.segmentation.nano import IMAGES, SEMANTIC_FPN
from polaformer.tasks.segmentation.recipe import SegmentationRecipe

FROM_SCRATCH: dict[str, Any] = NANO | {
    "schedule": "polynomial",
    "poly_power": 0.9,
    "warmup_lr": 1e-6,
    "min_lr": 0.0,
    "lr": 1e-3,
    "save_every": 50,
    "log_every": 25,
}

SEMANTIC_FPN_TINY = SegmentationRecipe(
    name="camvid/semantic-fpn-pola-pvt-tiny",
    expected="31.9 % mIoU on test in 37 minutes of a core; its softmax twin 28.5 %, a constant answer 2.4 % (docs/results.md)",
    **FROM_SCRATCH,
    **IMAGES,
    model="pola_pvt_tiny",
    drop_path_rate=0.0,
    steps=500,
    warmup_steps=50,
    eval_every_steps=125,
)
SEMANTIC_FPN_NANO = SegmentationRecipe(
    name="camvid/semantic-fpn-pola-pvt-nano",
    expected="31.0 % mIoU on test with --steps 600 (8 minutes of a core; a constant answer: 2.4 %); not run as configured",
    **FROM_SCRATCH,
    **SEMANTIC_FPN,
    steps=2000,
    warmup_steps=100,
    eval_every_steps=250,
)

RECIPES = (SEMANTIC_FPN_TINY, SEMANTIC_FPN_NANO)
