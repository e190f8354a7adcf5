"""Semantic segmentation. Importable without PyTorch."""
