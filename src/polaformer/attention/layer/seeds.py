"""Seeds of the layers of a model: equal seeds would make all of its random patterns equal."""

from torch import nn

from polaformer.attention.layer.attention_layer import AttentionLayer


def separate_seeds(model: nn.Module) -> None:
    """Gives each layer of seeded attention in the model another seed: 0, 1, …, in the order of the modules."""
    layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    for seed, core in enumerate(layer.core for layer in layers if layer.core.facts.seeded):
        core.seed = seed  # type: ignore[attr-defined]
