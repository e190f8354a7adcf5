"""One training loop for all tasks, with checkpoints, a journal, and handling of signals and divergence."""
