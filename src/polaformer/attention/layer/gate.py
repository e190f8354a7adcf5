"""The gate of Eq. 6: elementwise factors of the two streams.

# B batch, N tokens, C channels
"""

import math

import torch.nn.functional as F
from torch import Tensor, empty, nn

from polaformer.attention.layer.token_table import TokenTable
from polaformer.ops.grid import Grid, Sizes

GATES = ("linear", "matrix", None)
GATE_INITS = ("default", "kaiming_uniform", "zeros", "normal", "uniform", "ones")
GATE_BIAS_INITS = ("default", "zeros", "ones", "linear")


class LinearGate(nn.Module):
    """G as a projection of the input, W x + b, without an activation: the authors' code, and the 5Nd² of Eq. 10.

    Not an nn.Linear, so that a model that initialises every nn.Linear does not override `gate_init`.
    """

    def __init__(self, dim: int, *, bias: bool = True, init: str = "default", bias_init: str = "default") -> None:
        super().__init__()
        self.weight = nn.Parameter(empty(dim, dim))
        self.bias = nn.Parameter(empty(dim)) if bias else None
        initialise_gate(self.weight, init)
        if self.bias is not None:
            default = "zeros" if init == "default" else "linear"
            initialise_gate_bias(self.bias, default if bias_init == "default" else bias_init)

    def forward(self, x: Tensor, grid: Grid, sizes: Sizes = None) -> Tensor:
        """x (B, N, C) to factors (B, N, C)."""
        return F.linear(x, self.weight, self.bias)


class MatrixGate(TokenTable):
    """G as the formula prints it: a free N × C matrix, the same for every input, resized to other grids."""

    def __init__(self, size: Grid, dim: int, num_prefix_tokens: int = 0, *, init: str = "default") -> None:
        super().__init__(size, dim, num_prefix_tokens)
        # The paper's Long Range Arena rows use Kaiming; for a free matrix it is the only published choice.
        initialise_gate(self.rows, "kaiming_uniform" if init == "default" else init)

    def forward(self, x: Tensor, grid: Grid, sizes: Sizes = None) -> Tensor:  # type: ignore[override]
        """Factors (N, C) for the tokens of the grid, or (B, N, C) for samples of the given sizes on it."""
        return super().forward(grid, sizes).to(x.dtype)


def initialise_gate(weight: Tensor, init: str) -> None:
    """Fills weight in place: "default" as in the authors' vision models, the others as in the paper's study of G."""
    if init == "default":
        nn.init.trunc_normal_(weight, std=0.02)
    elif init == "kaiming_uniform":
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    elif init == "zeros":
        nn.init.zeros_(weight)
    elif init == "normal":
        nn.init.normal_(weight)
    elif init == "uniform":
        nn.init.uniform_(weight)
    elif init == "ones":
        nn.init.ones_(weight)
    else:
        raise ValueError(f"gate_init is {init!r}; choose one of {', '.join(GATE_INITS)}")


def initialise_gate_bias(bias: Tensor, init: str) -> None:
    """Fills bias in place; "linear" as PyTorch's linear layers."""
    if init == "zeros":
        nn.init.zeros_(bias)
    elif init == "ones":
        nn.init.ones_(bias)
    elif init == "linear":
        nn.init.uniform_(bias, -(len(bias) ** -0.5), len(bias) ** -0.5)
    else:
        raise ValueError(f"gate_bias_init is {init!r}; choose one of {', '.join(GATE_BIAS_INITS)}")
