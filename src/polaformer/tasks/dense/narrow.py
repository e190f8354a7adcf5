"""A narrow PVT: the backbone of detectors and segmenters that a CPU can train. Needs no PyTorch."""

from typing import Any

NARROW_PVT: dict[str, Any] = {
    "model": "pola_pvt_tiny",
    "dims": (32, 64, 128, 192),
    "depths": (1, 1, 2, 1),
    "num_heads": (1, 2, 4, 6),
    "mlp_ratios": (4.0, 4.0, 4.0, 4.0),
    "drop_path_rate": 0.0,
}
