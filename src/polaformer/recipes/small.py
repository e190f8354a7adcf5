"""What small trainings have in common: minutes on a CPU, rates as they are, no augmentation but crops."""

from polaformer.tasks.classification.recipe import ClassificationRecipe

SMALL = ClassificationRecipe(
    drop_path_rate=0.0,
    warmup_lr=1e-5,
    min_lr=1e-5,
    lr_images=0,
    clip_norm=1.0,
    crop_pct=1.0,
    auto_augment=None,
    color_jitter=0.0,
    erase_prob=0.0,
    mixup=0.0,
    cutmix=0.0,
    num_workers=1,
)
