"""Image classification. Importable without PyTorch."""
