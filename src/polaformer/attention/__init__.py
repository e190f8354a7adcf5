"""Attention mechanisms ("cores"), one a file, and the multi-head layer around any of them."""

from polaformer.attention.layer import AttentionLayer, PolaAttention
from polaformer.attention.registry import create, create_layer, facts, names, option_names
from polaformer.attention.windows import WindowAttention

__all__ = [
    "AttentionLayer",
    "PolaAttention",
    "WindowAttention",
    "create",
    "create_layer",
    "facts",
    "names",
    "option_names",
]
