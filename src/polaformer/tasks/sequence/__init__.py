"""Classification of long sequences: the five tasks of the Long Range Arena. Importable without PyTorch."""
