"""Small models of each family, the same classes as the large ones, for tests that need no size."""

import torch
from torch import nn

import polaformer

SMALL = {
    "pola_deit_tiny": {"dims": 16, "depths": 2, "num_heads": 2, "patch_size": 8},
    "pola_pvt_tiny": {"dims": (8, 12, 16, 20), "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": 2},
    "pola_pvt_v2_b0": {"dims": (8, 12, 16, 20), "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": 2},
    "pola_swin_tiny": {"dims": (8, 12, 16, 20), "depths": (1, 2, 2, 1), "num_heads": 2, "mlp_ratios": 2, "windows": 3},
    "softmax_deit_tiny": {"dims": 16, "depths": 2, "num_heads": 2, "patch_size": 8},
    "softmax_pvt_tiny": {"dims": (8, 12, 16, 20), "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": 2},
    "softmax_pvt_v2_b0": {"dims": (8, 12, 16, 20), "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 2), "mlp_ratios": 2},
    "softmax_swin_tiny": {"dims": (8, 12, 16, 20), "depths": (1, 2, 2, 1), "num_heads": 2, "mlp_ratios": 2, "windows": 3},
}


def small(name, **options):
    """The small model of that name, in evaluation mode, with nothing hidden behind a zero."""
    settings = {"num_classes": 5, "img_size": 64, "drop_path_rate": 0.0} | SMALL[name] | options
    return randomise(polaformer.create_model(name, **settings)).eval()


def randomise(model):
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def images(batch=2, height=64, width=64, channels=3, dtype=torch.float32):
    return torch.randn(batch, channels, height, width, dtype=dtype)
