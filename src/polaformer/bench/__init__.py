"""Speed and agreement, measured: ratios in one run, and no number for what does not compute the right thing."""

from polaformer.bench import agreement, length, machine, measure, op

__all__ = ["agreement", "length", "machine", "measure", "op"]
