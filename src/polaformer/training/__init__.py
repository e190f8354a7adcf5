"""One loop for all tasks, and what it needs to survive: checkpoints, a journal, signals, divergence."""
