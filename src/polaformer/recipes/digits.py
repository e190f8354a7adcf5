"""The bundled handwritten digits: data where none is given, and what `polaformer demo` trains on."""

from polaformer.recipes.classification import Classification

POLA_VIT_TINY = Classification(
    name="digits/pola-vit-tiny",
    paper="none; the 1,797 digits of 8×8 pixels that scikit-learn carries, 360 of them for testing",
    expected="at least 97.5 % of the 360 test digits, in under three minutes on two CPU cores",
    data="digits",
    model="pola_deit_tiny",
    img_size=8,
    patch_size=2,
    dims=(64,),
    depths=(3,),
    num_heads=(2,),
    mlp_ratios=(2.0,),
    drop_path_rate=0.0,
    mean=(0.305,),
    std=(0.376,),
    epochs=30,
    warmup_epochs=3,
    batch_size=64,
    lr=3e-3,
    warmup_lr=1e-5,
    min_lr=1e-5,
    lr_images=0,
    clip_norm=1.0,
    crop_scale=(0.7, 1.0),
    crop_ratio=(0.8, 1.25),
    crop_pct=1.0,
    interpolation="bilinear",
    hflip=0.0,
    auto_augment=None,
    color_jitter=0.0,
    erase_prob=0.0,
    mixup=0.0,
    cutmix=0.0,
    smoothing=0.1,
    num_workers=1,
    log_every=22,
    save_every=220,
)

RECIPES = (POLA_VIT_TINY,)
