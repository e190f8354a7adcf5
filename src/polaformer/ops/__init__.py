"""Pure functions on tensors: the operator, its oracle, its relatives, and the entropy that measures sharpness."""

from polaformer.ops import entropy, linear, polarity, precision, reference, variants

__all__ = ["entropy", "linear", "polarity", "precision", "reference", "variants"]
