"""Tasks: one package per task, their registry, and the code that trains any of them. Importable without PyTorch."""
