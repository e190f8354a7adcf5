"""Models by name: every variant of the paper, and the softmax twin of each."""

from collections.abc import Sequence
from dataclasses import fields
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from polaformer.backbones import deit, pvt, pvt_v2, swin
from polaformer.backbones.backbone import Backbone
from polaformer.backbones.config import BackboneConfig
from polaformer.backbones.deit import DeiT
from polaformer.backbones.fitting import fit_state_dict
from polaformer.backbones.loading import load_weights, unwrapped
from polaformer.backbones.pvt import PVT
from polaformer.backbones.pvt_v2 import PVTv2
from polaformer.backbones.swin import Swin
from polaformer.errors import nearest
from polaformer.ops.grid import Grid
from polaformer.weights.errors import WeightsError


class TimmFeatures(FeatureGetterNet):
    """timm's feature wrapper, which also accepts a pixel mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Images (B, C, H, W) to the features of the chosen stages."""
        chosen = {"indices": self.out_indices, "norm": self.norm, "output_fmt": self.output_fmt}
        return self.model.forward_intermediates(x, intermediates_only=True, mask=mask, **chosen)


class Variant(NamedTuple):
    """A named model: its class and the arguments."""

    family: type[Backbone]
    options: dict[str, Any]

    @property
    def config(self) -> BackboneConfig:
        """The arguments, and the defaults of the family."""
        return self.family.config_type(**self.options)


_FAMILIES: dict[str, tuple[type[Backbone], dict[str, dict[str, Any]]]] = {
    "deit": (DeiT, deit.VARIANTS),
    "pvt": (PVT, pvt.VARIANTS),
    "pvt_v2": (PVTv2, pvt_v2.VARIANTS),
    "swin": (Swin, swin.VARIANTS),
}
# A family's default attention is that of its pola models.
MODELS: dict[str, Variant] = {
    f"{kind}_{family}_{size}": Variant(cls, options | {"attention": attention or cls.config_type.attention})
    for kind, attention in (("pola", None), ("softmax", "softmax"))
    for family, (cls, variants) in _FAMILIES.items()
    for size, options in variants.items()
}


def softmax_twin(name: str) -> str:
    """The name of the same model with softmax attention in all stages: "softmax_swin_tiny" for "pola_swin_tiny"."""
    return f"softmax_{name.partition('_')[2]}"


def list_models(pattern: str | Sequence[str] = "*") -> list[str]:
    """The names that `create_model` accepts and that match a pattern such as "pola_swin*" or "*_384", or any of several."""
    patterns = [pattern] if isinstance(pattern, str) else pattern
    return [name for name in MODELS if any(fnmatch(name, one) for one in patterns)]


def create_model(
    name: str,
    *,
    num_classes: int = 1000,
    img_size: int | Grid | None = None,
    in_chans: int = 3,
    attention: str | Sequence[str] | None = None,
    drop_path_rate: float | None = None,
    checkpoint: str | PathLike[str] | None = None,
    **options: Any,
) -> nn.Module:
    """The model called `name`, freshly initialised, or with the parameters of a checkpoint file.

    num_classes: 0 omits the classifier. img_size: the native size, for which tables are built (the model accepts any other
    size too); by default the variant's. attention: one mechanism for all stages, one per stage ("pola,pola,softmax,softmax"),
    or the authors' letters ("LLSS"). drop_path_rate: by default the variant's published one.
    options: any other argument of the model's class, such as the variant's settings (dims, depths, num_heads, mlp_ratios,
    patch_size, reductions, windows, alpha, kernel_size); and features_only=True with out_indices, as in timm.
    A checkpoint must fit as it is; for other classes call `load_weights(model, path, reset_head=True)`.

    >>> create_model("pola_swin_tiny", num_classes=10, img_size=(256, 384))
    >>> create_model("pola_pvt_tiny", img_size=32, patch_size=2, dims=(32, 64, 160, 256), depths=(1, 1, 2, 1))
    """
    check_name(name)
    given = {"img_size": img_size, "attention": attention, "drop_path_rate": drop_path_rate}
    options |= {key: value for key, value in given.items() if value is not None}
    _check_options(name, options)
    if checkpoint is not None and not Path(checkpoint).exists():
        raise WeightsError(f"checkpoint {checkpoint} does not exist; check the path")
    model = build(name, num_classes=num_classes, in_chans=in_chans, **options)
    if checkpoint is not None:
        load_weights(model, checkpoint)
    return model


def build(name: str, *, pretrained: bool = False, **options: Any) -> nn.Module:
    """The entry point that timm calls: the model with timm's default_cfg, wrapped for features if requested."""
    variant = MODELS[name]
    arguments = variant.options | options
    overlay = dict(arguments.pop("pretrained_cfg_overlay", None) or {})
    names = {field.name for field in fields(variant.family.config_type)}
    settings = {key: value for key, value in arguments.items() if key in names}  # the rest is timm's
    config = variant.family.config_type(**settings)
    model = build_model_with_cfg(
        variant.family,
        name,
        pretrained,
        pretrained_cfg_overlay={"input_size": (config.in_chans, *config.grid)} | overlay,
        pretrained_filter_fn=fit_state_dict,
        feature_cfg={"out_indices": config.num_outputs, "feature_cls": TimmFeatures},
        **arguments,
    )
    inner = cast(Backbone, unwrapped(model))
    inner.built_from = {"name": name} | settings | {"num_classes": inner.num_classes, "in_chans": inner.in_chans}
    return model


def _default_cfg(variant: Variant) -> dict[str, Any]:
    config = variant.config
    return {
        "num_classes": 1000,
        "input_size": (3, *config.grid),
        "pool_size": config.stages()[-1].grid,
        # The authors evaluate at 224 from images of 256×256, and at 384 from images of that size.
        "crop_pct": 0.875 if config.img_size == 224 else 1.0,
        "crop_mode": "squash",
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": variant.family.first_conv,
        "classifier": "head",
        "fixed_input_size": False,
        "license": "mit",
    }


default_cfgs = generate_default_cfgs({name: _default_cfg(variant) for name, variant in MODELS.items()})


def check_name(name: str) -> None:
    """Raises ValueError unless a model has that name."""
    if not isinstance(name, str) or name not in MODELS:
        hint = nearest(str(name), MODELS)
        raise ValueError(f"unknown model {name!r}; {hint}polaformer.list_models() and `polaformer models` list them")


def _check_options(name: str, options: dict[str, Any]) -> None:
    known = [*(field.name for field in fields(MODELS[name].family.config_type)), "features_only", "out_indices"]
    unknown = [option for option in options if option not in known]
    if not isinstance(options.get("features_only", False), bool):
        raise TypeError(f"create_model: features_only is {options['features_only']!r}; give True or False")
    if "out_indices" in options and not options.get("features_only"):
        raise TypeError("create_model: out_indices chooses features; give features_only=True too")
    if unknown:
        hint = nearest(unknown[0], known)
        raise TypeError(f"create_model: {name} does not take {', '.join(unknown)}; {hint}it takes {', '.join(known)}")
