"""Sharpness of three attention mechanisms on the same queries and keys: positive sequence entropy, Eq. 7 of the paper.

# B batch, H heads, N queries, M keys, D head width, F features of a token
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from polaformer.attention import create
from polaformer.extras import require
from polaformer.ops.entropy import positive_sequence_entropy
from polaformer.ops.polarity.variants import polarity_maps

POWERS = (1.0, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Sharpness:
    """The attention map of one mechanism and the entropy of its rows."""

    mechanism: str
    power: float | None  # polarity attention only
    weights: Tensor  # (B, H, N, M)
    entropy: Tensor  # (B, H, N), nats

    @property
    def mean(self) -> float:
        """The mean entropy of a row, in nats."""
        return float(self.entropy.mean())

    @property
    def fraction(self) -> float:
        """The mean entropy as a fraction of log(M), the entropy of uniform attention."""
        return self.mean / log(self.weights.shape[-1])


def compare(q: Tensor, k: Tensor, powers: Sequence[float] = POWERS) -> list[Sharpness]:
    """Softmax, ELU + 1 linear, and both streams of polarity attention at each power, on the same q and k.

    q (B, H, N, D), k (B, H, M, D) with M ≥ 2. All heads and channels use the same power. A query without key mass in a stream
    has no entropy there and raises ValueError.
    """
    num_heads, head_dim = q.shape[1], q.shape[3]
    maps: list[tuple[str, float | None, Tensor]] = []
    for name in ("softmax", "linear"):
        maps.append((name, None, create(name, num_heads=num_heads, head_dim=head_dim).weights(q, k)[name]))
    for power in powers:
        same, opposite = polarity_maps(q, k, torch.full((num_heads, head_dim), power, dtype=q.dtype, device=q.device))
        maps += [("polarity, same sign", power, same), ("polarity, opposite sign", power, opposite)]
    return [Sharpness(name, power, weights, positive_sequence_entropy(weights)) for name, power, weights in maps]


def digit_images(num_images: int) -> Tensor:
    """The first handwritten digits of scikit-learn's bundled dataset, (num_images, 8, 8), in [0, 1]."""
    require("train", "sklearn")
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    return torch.tensor(load_digits().images[:num_images], dtype=torch.float32) / 16


def pixel_tokens(images: Tensor) -> Tensor:
    """One token per pixel, (B, height·width, 11): its 3×3 neighbourhood, row and column, standardised to mean 0, variance 1."""
    batch, height, width = images.shape
    around = F.unfold(images[:, None], kernel_size=3, padding=1).mT  # (B, N, 9)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    position = torch.stack([rows, columns], dim=-1).flatten(0, 1).to(images.dtype)  # (N, 2)
    tokens = torch.cat([around, position.expand(batch, -1, -1)], dim=-1)
    return (tokens - tokens.mean(dim=(0, 1))) / tokens.std(dim=(0, 1))


def random_queries_and_keys(tokens: Tensor, *, num_heads: int = 4, head_dim: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """q and k, each (B, H, N, D): two fixed Gaussian projections of tokens (B, N, F), with variance near 1."""
    generator = torch.Generator().manual_seed(seed)
    features = tokens.shape[-1]

    def project() -> Tensor:
        weight = torch.randn(features, num_heads * head_dim, generator=generator) / features**0.5
        return (tokens @ weight).unflatten(-1, (num_heads, head_dim)).transpose(1, 2)

    return project(), project()
