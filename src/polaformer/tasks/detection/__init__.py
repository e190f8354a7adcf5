"""Object detection and instance segmentation. Importable without PyTorch."""
