"""Speed, memory and correctness, measured: ratios within one run, and no number for an implementation that is wrong."""
