"""COCO detection and instance segmentation: every row of the paper's table, and a small recipe for a CPU.

`coco/mask-rcnn-pola-pvt-tiny-1x` and its neighbours follow the paper: AdamW, learning rate 1e-4, weight decay 1e-4, 12
epochs per schedule unit (1x, 3x), the learning rate divided by 10 after 8 and 11 epochs (27 and 33), 16 images per update,
500 updates of warm-up. Norms and position tables are not decayed. What the paper leaves open comes from the nearest
published configurations; where these differ from the paper, the paper is followed:

- Agent Attention, PVT: RetinaNet the same; Mask R-CNN with a learning rate of 2e-4.
- Agent Attention, Swin: weight decay 0.05, drop path 0.1, and multi-scale training with crops even at 1x. Here 1x resizes to
  800 pixels, and 3x trains with multi-scale and crops.
- PolaFormer++: RetinaNet the same, but it decays norms and tables too; Mask R-CNN with weight decay 0.05; 3x with multi-scale
  and crops.

All of them start from ImageNet weights (--backbone). For the rows of softmax and FLatten, override `attention`:
--attention softmax, or --attention focused (in Swin focused,focused,softmax,softmax). We have not run them: each needs eight
GPUs for one to three days.
"""

from dataclasses import replace
from typing import Any

from polaformer.recipes.dense import NANO, of_paper
from polaformer.tasks.detection import nano
from polaformer.tasks.detection.detector_facts import DETECTORS
from polaformer.tasks.detection.published import ROWS, CocoRow
from polaformer.tasks.detection.recipe import DetectionRecipe

MULTI_SCALE = tuple(range(480, 801, 32))
WARMUP: dict[str, Any] = {"warmup_steps": 500, "warmup_lr": 1e-7}  # from 0.001 of the learning rate


def build_recipe(row: CocoRow) -> DetectionRecipe:
    """The recipe of a row of the paper's table."""
    masks = "" if row.mask_ap is None else f", {row.mask_ap} % mask AP"
    result, schedule, is_long = f"{row.box_ap} % box AP{masks} on val2017", f"{row.schedule}x", row.schedule == 3
    return DetectionRecipe(
        **of_paper("COCO", row.detector, row.model, result=result, schedule=schedule, suffix=f"-{schedule}"),
        detector=row.detector,
        **DETECTORS[row.detector].as_published,
        drop_path_rate=0.1,
        sizes=MULTI_SCALE if is_long else (800,),
        crop=is_long,
        epochs=12 * row.schedule,
        milestones=(27, 33) if is_long else (8, 11),
        schedule="multi-step",
        lr=1e-4,
        weight_decay=1e-4,
        **WARMUP,
    )


# For minutes on a CPU.
RETINANET = DetectionRecipe(
    name="coco/retinanet-pola-pvt-nano",
    expected="0.06 % box AP after 10 minutes of a core on 343 images: far too few; it overfits ten images (docs/results.md)",
    **NANO,
    **nano.RETINANET,
    epochs=8,
    milestones=(5, 7),
    schedule="multi-step",
    warmup_steps=40,
    warmup_lr=4e-6,
    group_size=8,
    lr=4e-4,
    log_every=10,
    eval_every=2,
)

MASK_RCNN = replace(
    RETINANET,
    name="coco/mask-rcnn-pola-pvt-nano",
    expected="not run as configured; with other options it overfits ten images (docs/results.md)",
    **nano.MASK_RCNN,
)

RECIPES = (*(build_recipe(row) for row in ROWS), MASK_RCNN, RETINANET)
