"""Everything that a training is made of, as frozen dataclasses; importable without PyTorch."""
