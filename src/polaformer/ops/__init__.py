"""Pure functions on tensors: the operator, its oracle, its relatives, and the entropy that measures sharpness."""
