"""Settings that recipes of detection and segmentation share. Needs no PyTorch."""

from typing import Any

# Recipes for a CPU, from scratch.
NANO: dict[str, Any] = {
    "paper": "none; a comparison that a CPU can afford",
    "needs_data": True,
    "batch_size": 8,
    "lr_images": 0,
    "weight_decay": 0.05,
    "clip_norm": 1.0,
    "num_workers": 1,
}


def of_paper(table: str, kind: str, model: str, *, result: str, schedule: str, suffix: str = "") -> dict[str, Any]:
    """What the rows of the paper's tables share: 16 images per update, for which the learning rate is given, ImageNet weights.

    table: COCO or ADE20K. kind: the detector or segmenter. result: what the paper reports. suffix: of the recipe's name.
    """
    return {
        "name": f"{table.lower()}/{kind}-{model.replace('_', '-')}{suffix}",
        "paper": f"{table} table, row {kind}, {model}, {schedule}",
        "expected": f"{result} from ImageNet weights, as the paper says; not run by us",
        "model": model,
        "needs_data": True,
        "batch_size": 16,
        "lr_images": 16,
        "clip_norm": None,
    }
