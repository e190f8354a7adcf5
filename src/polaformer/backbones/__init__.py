"""Backbones with any attention: DeiT, PVT, PVTv2 and Swin. Importing this package also registers them in timm."""

from polaformer.backbones.backbone import Backbone
from polaformer.backbones.deit import DeiT
from polaformer.backbones.loading import load_weights as load_checkpoint
from polaformer.backbones.loading import save_weights as save_checkpoint
from polaformer.backbones.pvt import PVT
from polaformer.backbones.pvt_v2 import PVTv2
from polaformer.backbones.registry import create_model, list_models
from polaformer.backbones.swin import Swin
from polaformer.backbones.timm_models import register_all
from polaformer.weights.errors import WeightsError as CheckpointError

__all__ = [
    "PVT",
    "Backbone",
    "CheckpointError",
    "DeiT",
    "PVTv2",
    "Swin",
    "create_model",
    "list_models",
    "load_checkpoint",
    "save_checkpoint",
]

register_all()
