"""Weights files: reading, checking, refusing and writing them. Knows no model."""
