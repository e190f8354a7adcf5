"""Polarity-aware linear attention: the operator and its backends."""

from polaformer.ops.allocator import keep_freed_memory

keep_freed_memory()
