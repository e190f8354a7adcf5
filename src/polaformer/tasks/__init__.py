"""What is learnt: a folder for each task, a registry of all, and what trains any of them. Importable without PyTorch."""
