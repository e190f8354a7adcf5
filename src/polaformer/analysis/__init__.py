"""Analysis of models: sharpness, counts, agreement, timing, memory and the machine; figures and reports."""

from polaformer.analysis import figures, sharpness

__all__ = ["figures", "sharpness"]
