"""The bundled handwritten digits: the default data, and what `polaformer demo` trains on."""

from dataclasses import replace

from polaformer.recipes.small import SMALL

# Hyperparameters chosen on splits of the 1,437 training digits only (docs/results.md).
POLA_VIT_TINY = replace(
    SMALL,
    name="digits/pola-vit-tiny",
    paper="none; the 1,797 digits of 8×8 pixels that scikit-learn carries, 360 of them for testing",
    expected="at least 98 % of the 360 test digits, in under three minutes on two CPU cores",
    data="digits",
    model="pola_deit_tiny",
    img_size=8,
    patch_size=2,
    dims=(64,),
    depths=(3,),
    num_heads=(2,),
    mlp_ratios=(2.0,),
    mean=(0.305,),
    std=(0.376,),
    epochs=60,
    warmup_epochs=3,
    batch_size=64,
    lr=3e-3,
    crop_scale=(0.85, 1.0),
    crop_ratio=(0.9, 1.1),
    ema_decay=0.99,
    interpolation="bilinear",
    hflip=0.0,
    log_every=22,
    eval_every=4,
    save_every=220,
)

RECIPES = (POLA_VIT_TINY,)
