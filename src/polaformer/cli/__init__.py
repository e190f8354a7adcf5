"""The command line: one small file a command. Nothing here imports torch before a command runs."""
