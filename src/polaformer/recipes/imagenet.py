"""ImageNet-1K, Tables 1 and 4 of the paper: every variant, with the paper's 400 epochs and with the released configurations.

`imagenet/pola-swin-tiny` follows the paper: 400 epochs, 20 of them warm-up, AdamW, learning rate 1e-3 for 1,024 images, weight
decay 0.05; what the paper leaves open (smallest learning rates, clipping, batch size, drop path) comes from the released
configuration of the same model. `imagenet/pola-swin-tiny-300` is that configuration: 300 epochs; for PVT with 5 warm-up epochs
and 10 more at the smallest learning rate. `imagenet/pola-swin-base-384` fine-tunes weights trained at 224 pixels for 30 epochs
at 384; it was released for Swin-B, and is used here for S and T too. For DeiT and PVTv2 nothing was released: PVTv2 follows
FLatten's configurations, which equal those of its PVT; DeiT follows the paper's text.

For the row of a rival, override `attention`: --attention softmax, --attention linear, … We have run none of these: each needs
about eight GPUs for days.
"""

from dataclasses import replace
from typing import NamedTuple

from polaformer.tasks.classification.recipe import ClassificationRecipe


class ImageNetRow(NamedTuple):
    """What differs between variants: images per update on eight GPUs, the gradient clipping norm, the paper's top-1 in %."""

    batch_size: int
    clip_norm: float | None
    top1: float | None
    table: str = "Table 4"


ROWS = {
    "pola_deit_tiny": ImageNetRow(1024, None, 74.6, "Table 1"),
    "pola_deit_small": ImageNetRow(1024, None, None),
    "pola_deit_base": ImageNetRow(1024, None, None),
    "pola_pvt_tiny": ImageNetRow(1024, None, 78.8),
    "pola_pvt_small": ImageNetRow(512, None, 81.9),
    "pola_pvt_medium": ImageNetRow(512, 1.0, None),
    "pola_pvt_large": ImageNetRow(256, 1.0, None),
    "pola_pvt_v2_b0": ImageNetRow(1024, None, 72.3),
    "pola_pvt_v2_b1": ImageNetRow(1024, None, 80.2),
    "pola_pvt_v2_b2": ImageNetRow(1024, None, None),
    "pola_pvt_v2_b3": ImageNetRow(1024, 1.0, None),
    "pola_pvt_v2_b4": ImageNetRow(512, 1.0, None),
    "pola_pvt_v2_b5": ImageNetRow(512, 1.0, None),
    "pola_swin_tiny": ImageNetRow(1024, 5.0, 82.6, "Table 1"),
    "pola_swin_small": ImageNetRow(1024, 5.0, 83.6),
    "pola_swin_base": ImageNetRow(512, 5.0, 83.8),
}
RELEASED = ("pola_pvt_tiny", "pola_pvt_small", "pola_pvt_medium", "pola_pvt_large", "pola_swin")
NO_NUMBER = "the paper has no number for this model"
FINE_TUNED = {"pola_swin_tiny_384": None, "pola_swin_small_384": 84.7, "pola_swin_base_384": None}


def _recipe_name(model: str, suffix: str = "") -> str:
    return f"imagenet/{model.replace('_', '-')}{suffix}"


def _expected(top1: float | None, epochs: int) -> str:
    if top1 is None:
        return NO_NUMBER
    printed = f"{top1} % top-1 on the 50,000 validation images, as the paper says"
    return printed if epochs == 400 else f"{printed} for 400 epochs; this has {epochs}"


def _paper_recipe(model: str, row: ImageNetRow) -> ClassificationRecipe:
    return ClassificationRecipe(
        name=_recipe_name(model),
        paper=f"{row.table}, {model}, 400 epochs" if row.top1 else "the paper has no row of this model",
        expected=_expected(row.top1, 400),
        model=model,
        epochs=400,
        batch_size=row.batch_size,
        clip_norm=row.clip_norm,
        warmup_lr=1e-6 if "pvt" in model else 5e-7,
        min_lr=1e-5 if "pvt" in model else 5e-6,
    )


def _released_recipe(model: str, row: ImageNetRow) -> ClassificationRecipe:
    paper, is_pvt = _paper_recipe(model, row), "pvt" in model
    like = "FLatten's PVTv2" if is_pvt else "the authors' Swin"
    source = "the released configuration" if model.startswith(RELEASED) else f"nothing was released; as {like}"
    return replace(
        paper,
        name=_recipe_name(model, "-300"),
        paper=f"{paper.paper.removesuffix(', 400 epochs')}; 300 epochs: {source}",
        expected=_expected(row.top1, 300),
        epochs=300,
        warmup_epochs=5 if is_pvt else paper.warmup_epochs,
        cooldown_epochs=10 if is_pvt else 0,
    )


def _fine_tuning_recipe(model: str, top1: float | None) -> ClassificationRecipe:
    return ClassificationRecipe(
        name=_recipe_name(model),
        paper=f"Table 4, {model}: 30 epochs at 384 pixels from weights of 224",
        expected=f"{top1} % top-1, as the paper says" if top1 else NO_NUMBER,
        needs_checkpoint=True,
        model=model,
        img_size=384,
        crop_pct=1.0,
        epochs=30,
        warmup_epochs=5,
        batch_size=256,
        lr=2e-5,
        warmup_lr=2e-8,
        min_lr=2e-7,
        weight_decay=1e-8,
    )


RECIPES = (
    *(_paper_recipe(model, row) for model, row in ROWS.items()),
    *(_released_recipe(model, row) for model, row in ROWS.items()),
    *(_fine_tuning_recipe(model, top1) for model, top1 in FINE_TUNED.items()),
)
