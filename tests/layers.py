"""What most tests of the layer need: a grid, tokens on it, and a layer with nothing hidden behind a zero."""

import torch
from torch import nn

from polaformer import PolaAttention

GRID = (4, 5)


def randomise(layer):
    """Non-trivial values in every parameter, so that nothing is hidden behind a zero."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def pola(dim=12, num_heads=2, **options):
    return randomise(PolaAttention(dim, num_heads, **options)).double()


def tokens(num=20, dim=12, batch=2):
    return torch.randn(batch, num, dim, dtype=torch.float64)
