"""People's own photos: a few hundred to a few ten thousand images in a folder of class folders. Not of the paper.

The ImageNet recipes are for 1.28 million images and hundreds of epochs. On a few thousand images their augmentation hides most
of what there is to learn, and their rate, scaled down to a small batch, is too low. `photos/pola-pvt-tiny` trains from scratch
with light augmentation. `photos/pola-pvt-tiny-finetune` starts from weights of the same model (`--checkpoint`) with a rate that
falls from layer to layer; its head is new where the classes differ. docs/results.md has a run of the first.

Photos keep their shape (`resize="shorter"`): they are cut, not squeezed. The rates are for 64 images per update and follow
`--batch-size`. A GPU affords `--img-size 224 --epochs 100`.
"""

from dataclasses import replace

from polaformer.tasks.classification.recipe import ClassificationRecipe

SCRATCH = ClassificationRecipe(
    needs_data=True,
    img_size=128,
    epochs=50,
    warmup_epochs=5,
    batch_size=64,
    lr=1e-3,
    warmup_lr=1e-5,
    min_lr=1e-5,
    lr_images=64,
    clip_norm=1.0,
    drop_path_rate=0.0,
    resize="shorter",
    crop_pct=0.95,
    crop_scale=(0.5, 1.0),
    auto_augment=None,
    color_jitter=0.2,
    erase_prob=0.0,
    mixup=0.0,
    cutmix=0.0,
    log_every=10,
)
FINE_TUNED = replace(
    SCRATCH,
    needs_checkpoint=True,
    img_size=224,
    epochs=20,
    warmup_epochs=2,
    lr=3e-4,
    warmup_lr=1e-6,
    min_lr=1e-6,
    layer_decay=0.75,
    drop_path_rate=0.1,
)


def _scratch(model: str, size: str) -> ClassificationRecipe:
    return replace(
        SCRATCH,
        name=f"photos/{model.replace('_', '-')}",
        paper="none; for people's own photos",
        expected=f"depends on the photos; trains {size} parameters from scratch, so thousands of images help",
        model=model,
        drop_path_rate=0.1 if "swin" in model else 0.0,  # of twice the parameters
    )


def _fine_tuned(model: str) -> ClassificationRecipe:
    return replace(
        FINE_TUNED,
        name=f"photos/{model.replace('_', '-')}-finetune",
        paper="none; for people's own photos",
        expected="depends on the photos and the weights; not run by us, as there are no ImageNet weights here",
        model=model,
    )


RECIPES = (
    _scratch("pola_pvt_tiny", "12 million"),
    _scratch("pola_swin_tiny", "29 million"),
    _fine_tuned("pola_pvt_tiny"),
    _fine_tuned("pola_swin_tiny"),
)
