"""CIFAR-10 in minutes on a CPU: a small PVT, to compare mechanisms on natural images. Not from the paper."""

from dataclasses import replace

from polaformer.recipes.small import SMALL

POLA_PVT_NANO = replace(
    SMALL,
    name="cifar10/pola-pvt-nano",
    paper="none; a comparison that a CPU can afford (benchmarks/cifar10_arrays.py writes the data)",
    expected="docs/results.md has a run of both twins",
    model="pola_pvt_tiny",
    img_size=32,
    patch_size=4,
    dims=(48, 96, 160, 192),
    depths=(2, 2, 2, 1),
    num_heads=(1, 2, 4, 4),
    mlp_ratios=(4.0, 4.0, 3.0, 3.0),
    reductions=(1, 1, 1, 1),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.247, 0.2435, 0.2616),
    epochs=4,
    warmup_epochs=1,
    batch_size=128,
    lr=2e-3,
    crop_scale=(0.6, 1.0),
)

RECIPES = (POLA_PVT_NANO,)
