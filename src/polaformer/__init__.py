"""Polarity-aware linear attention (PolaFormer, ICLR 2025).

Importing this package is cheap: PyTorch and the subpackages load when a name is first used (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polaformer import analysis, attention, backbones, bench, data, ops, recipes, tasks, training, weights
    from polaformer.attention.layer.attention_layer import AttentionLayer, PolaAttention
    from polaformer.backbones import CheckpointError, load_checkpoint, save_checkpoint
    from polaformer.backbones.registry import create_model, list_models
    from polaformer.ops.entropy import positive_sequence_entropy
    from polaformer.ops.polarity.operator import polarity_attention

__version__ = "0.1.0"

# Public name → the module that holds it.
_PUBLIC = {
    "polarity_attention": "polaformer.ops.polarity.operator",
    "positive_sequence_entropy": "polaformer.ops.entropy",
    "AttentionLayer": "polaformer.attention.layer.attention_layer",
    "PolaAttention": "polaformer.attention.layer.attention_layer",
    "create_model": "polaformer.backbones",
    "list_models": "polaformer.backbones",
    "load_checkpoint": "polaformer.backbones",
    "save_checkpoint": "polaformer.backbones",
    "CheckpointError": "polaformer.backbones",
}
_PACKAGES = ("ops", "weights", "attention", "backbones", "data", "tasks", "training", "recipes", "analysis", "bench")

__all__ = [
    "AttentionLayer",
    "CheckpointError",
    "PolaAttention",
    "__version__",
    "analysis",
    "attention",
    "backbones",
    "bench",
    "create_model",
    "data",
    "list_models",
    "load_checkpoint",
    "ops",
    "polarity_attention",
    "positive_sequence_entropy",
    "recipes",
    "save_checkpoint",
    "tasks",
    "training",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"polaformer.{name}")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'polaformer' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
