"""The attention mechanisms ("cores"), one per file."""
