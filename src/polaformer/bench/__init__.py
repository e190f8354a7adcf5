"""Speed, memory and agreement, measured: ratios in one run, and no number for what does not compute the right thing."""

from polaformer.bench import agreement, contenders, length, machine, measure, memory, op

__all__ = ["agreement", "contenders", "length", "machine", "measure", "memory", "op"]
