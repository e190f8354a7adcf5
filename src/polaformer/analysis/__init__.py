"""Looks in from the side: sharpness of attention maps, and figures."""

from polaformer.analysis import figures, sharpness

__all__ = ["figures", "sharpness"]
