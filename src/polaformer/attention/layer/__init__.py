"""The multi-head layer around any mechanism, and its parts."""
