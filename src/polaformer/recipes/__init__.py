"""Recipes: every hyperparameter of a training run in one frozen dataclass; importable without PyTorch."""
