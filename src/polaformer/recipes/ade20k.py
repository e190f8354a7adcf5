"""ADE20K semantic segmentation: every row of the paper's table.

The paper says: AdamW, learning rate 2e-4, weight decay 1e-3; Semantic FPN around PVT for 40,000 updates, UPerNet around Swin
for 160,000. What it leaves open comes from the nearest published configurations: 16 images per update, crops of 512×512 pixels
after a scale of 0.5 to 2, whole images with a shorter side of 512 pixels in evaluation. Norms, biases and position tables are
not decayed. Where those configurations differ from the paper, the paper is followed:

- Agent Attention, PVT (as PVT itself): learning rate 2e-4 but weight decay 1e-4, everything decayed, power 0.9, drop path
  0.1, no warm-up.
- Swin, UPerNet: learning rate 6e-5 and weight decay 0.01, power 1, 1,500 updates of warm-up, drop path 0.3, an auxiliary head.

The schedule's shape, warm-up and drop path are theirs. The paper's one pair of values for both may be a simplification: to
train as they do, give --weight-decay 1e-4, or --lr 6e-5 --weight-decay 0.01.

All of them start from ImageNet weights (--backbone). For the rows of softmax and FLatten, override `attention`:
--attention softmax, or --attention focused (in Swin focused,focused,softmax,softmax). We have not run them: they need eight
GPUs for hours.
"""

from typing import Any

from polaformer.recipes.dense import of_paper
from polaformer.tasks.segmentation.published import ROWS, AdeRow
from polaformer.tasks.segmentation.recipe import SegmentationRecipe

SCHEDULES: dict[str, dict[str, Any]] = {
    "semantic-fpn": {"poly_power": 0.9, "warmup_steps": 0, "drop_path_rate": 0.1, "eval_every_steps": 4000},
    "upernet": {
        "poly_power": 1.0,
        "warmup_steps": 1500,
        "warmup_lr": 2e-10,  # 1e-6 of the learning rate
        "drop_path_rate": 0.3,
        "eval_every_steps": 16_000,
    },
}


def build_recipe(row: AdeRow) -> SegmentationRecipe:
    """The recipe of a row of the paper's table."""
    result = f"{row.miou} % mIoU on the validation images"
    return SegmentationRecipe(
        **of_paper("ADE20K", row.segmenter, row.model, result=result, schedule=f"{row.steps:,} updates"),
        segmenter=row.segmenter,
        steps=row.steps,
        schedule="polynomial",
        lr=2e-4,
        min_lr=0.0,
        weight_decay=1e-3,
        save_every=1000,
        **SCHEDULES[row.segmenter],
    )


RECIPES = tuple(build_recipe(row) for row in ROWS)
