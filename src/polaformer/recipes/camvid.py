"""CamVid semantic segmentation, 11 classes of street scenes: small enough to train from scratch on a CPU.

The data are SegNet's version: 367 training, 101 validation and 233 test images of 480×360 pixels. A narrow backbone and head,
crops of 256 pixels. For the softmax twin override `attention`: --attention softmax.
"""

from polaformer.tasks.segmentation.nano import SEMANTIC_FPN
from polaformer.tasks.segmentation.recipe import SegmentationRecipe

NANO = SegmentationRecipe(
    name="camvid/semantic-fpn-pola-pvt-nano",
    paper="none; a comparison that a CPU can afford",
    expected="TODO",
    needs_data=True,
    **SEMANTIC_FPN,
    steps=2000,
    schedule="polynomial",
    poly_power=0.9,
    warmup_steps=100,
    warmup_lr=1e-6,
    min_lr=0.0,
    batch_size=8,
    lr=1e-3,
    lr_images=0,
    weight_decay=0.05,
    clip_norm=1.0,
    eval_every_steps=250,
    save_every=100,
    log_every=25,
    num_workers=1,
)

RECIPES = (NANO,)
