"""Weights files: reading, checking and writing them, and what is refused. Knows no model."""
