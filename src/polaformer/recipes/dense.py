"""Settings that recipes of detection and segmentation share. Needs no PyTorch."""

from typing import Any

# The paper's rows: 16 images per update, for which the learning rate is given, from ImageNet weights.
PAPER: dict[str, Any] = {"needs_data": True, "batch_size": 16, "lr_images": 16, "clip_norm": None}
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
