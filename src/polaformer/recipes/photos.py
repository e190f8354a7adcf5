"""Your own photos: from a few hundred to some ten thousand images in a folder of class folders. Not from the paper.

The ImageNet recipes are for 1.28 million images and hundreds of epochs. On a few thousand images their augmentation hides most
of what there is to learn, and their learning rate, scaled down to a small batch, is too low. `photos/pola-pvt-tiny` trains from
scratch with light augmentation. `photos/pola-pvt-tiny-finetune` starts from weights of the same model (`--checkpoint`) with
layer-wise learning rate decay; it gets a new head if the classes differ. docs/results.md has a run of the first.

Photos keep their aspect ratio (`resize="shorter"`): they are cropped, not squashed. The learning rates are for 64 images per
update and scale with `--batch-size`. On a GPU, `--img-size 224 --epochs 100` is affordable.
"""

from dataclasses import replace

from polaformer.recipes.small import LIGHT
from polaformer.tasks.classification.recipe import ClassificationRecipe

SCRATCH = replace(
    LIGHT,
    paper="none; for people's own photos",
    needs_data=True,
    img_size=128,
    resize="shorter",
    crop_pct=0.95,
    crop_scale=(0.5, 1.0),
    color_jitter=0.2,
    epochs=50,
    warmup_epochs=5,
    batch_size=64,
    lr=1e-3,
    lr_images=64,
    log_every=10,
)
FINE_TUNED = replace(
    SCRATCH,
    expected="depends on the photos and the weights; not run by us, as there are no ImageNet weights here",
    needs_checkpoint=True,
    img_size=224,
    drop_path_rate=0.1,
    layer_decay=0.75,
    epochs=20,
    warmup_epochs=2,
    lr=3e-4,
    warmup_lr=1e-6,
    min_lr=1e-6,
)


def _scratch(model: str, size: str) -> ClassificationRecipe:
    return replace(
        SCRATCH,
        name=f"photos/{model.replace('_', '-')}",
        expected=f"depends on the photos; trains {size} parameters from scratch, so thousands of images help",
        model=model,
        drop_path_rate=0.1 if "swin" in model else 0.0,  # it has more than twice the parameters
    )


def _fine_tuned(model: str) -> ClassificationRecipe:
    return replace(FINE_TUNED, name=f"photos/{model.replace('_', '-')}-finetune", model=model)


RECIPES = (
    _scratch("pola_pvt_tiny", "12 million"),
    _scratch("pola_swin_tiny", "29 million"),
    _fine_tuned("pola_pvt_tiny"),
    _fine_tuned("pola_swin_tiny"),
)
