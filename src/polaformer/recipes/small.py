"""Settings that recipes for small datasets share."""

from dataclasses import replace

from polaformer.tasks.classification.recipe import ClassificationRecipe

# No augmentation but random crops and flips.
LIGHT = ClassificationRecipe(
    warmup_lr=1e-5,
    min_lr=1e-5,
    clip_norm=1.0,
    drop_path_rate=0.0,
    auto_augment=None,
    color_jitter=0.0,
    erase_prob=0.0,
    mixup=0.0,
    cutmix=0.0,
)
# Minutes on a CPU; the learning rates do not follow the batch size.
SMALL = replace(LIGHT, lr_images=0, crop_pct=1.0, num_workers=1)
