"""The kinds of data that can be opened, one per file."""
