"""Backbones with any attention: DeiT, PVT, PVTv2 and Swin. Importing this package registers them in timm too."""

from polaformer.backbones.backbone import Backbone
from polaformer.backbones.checkpoints import load_checkpoint, save_checkpoint
from polaformer.backbones.deit import DeiT
from polaformer.backbones.files import CheckpointError
from polaformer.backbones.pvt import PVT
from polaformer.backbones.pvt_v2 import PVTv2
from polaformer.backbones.registry import create_model, list_models
from polaformer.backbones.swin import Swin
from polaformer.backbones.timm_models import register_all

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
