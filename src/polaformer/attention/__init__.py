"""Attention mechanisms ("cores"), one per file, and the multi-head layer around any of them."""

from polaformer.attention.layer.attention_layer import AttentionLayer, PolaAttention
from polaformer.attention.layer.window_attention import WindowAttention
from polaformer.attention.registry import create, create_layer, facts, names, option_names

__all__ = ["AttentionLayer", "PolaAttention", "WindowAttention", "create", "create_layer", "facts", "names", "option_names"]
