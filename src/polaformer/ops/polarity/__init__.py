"""Polarity-aware linear attention: the operator and its backends."""
