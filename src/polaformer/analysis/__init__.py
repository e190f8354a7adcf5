"""Analysis of models: sharpness of attention maps, counts of parameters and MACs, figures, reports, the machine."""

from polaformer.analysis import figures, sharpness

__all__ = ["figures", "sharpness"]
