"""The command line: one small file per command. Nothing here imports torch before a command runs."""
