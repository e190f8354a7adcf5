"""CamVid semantic segmentation, 11 classes of street scenes: small enough to train from scratch on a CPU.

The data are SegNet's version: 367 training, 101 validation and 233 test images of 480×360 pixels. A narrow backbone and head,
crops of 256 pixels. An update takes 0.7 seconds of a core. For the softmax twin override `attention`: --attention softmax.

With --steps 600 (seed 0, one thread of an AMD EPYC) the mIoU on test is 31.0 % with pola and 30.5 % with softmax: poles, signs,
fences, pedestrians and bicyclists are not found yet. The whole schedule has not been run.
"""

from polaformer.recipes.dense import NANO
from polaformer.tasks.segmentation.nano import SEMANTIC_FPN
from polaformer.tasks.segmentation.recipe import SegmentationRecipe

SEMANTIC_FPN_NANO = SegmentationRecipe(
    name="camvid/semantic-fpn-pola-pvt-nano",
    expected="31.0 % mIoU on test with --steps 600 (8 minutes of a core; a constant answer: 2.4 %); not run as it is",
    **NANO,
    **SEMANTIC_FPN,
    steps=2000,
    schedule="polynomial",
    poly_power=0.9,
    warmup_steps=100,
    warmup_lr=1e-6,
    min_lr=0.0,
    lr=1e-3,
    eval_every_steps=250,
    save_every=100,
    log_every=25,
)

RECIPES = (SEMANTIC_FPN_NANO,)
