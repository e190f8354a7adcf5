"""Parameters and multiply-accumulates (MACs) of a model: in full, and as the paper counts them.

In full: every parameter, and every matmul and convolution, including those inside attention, from torch's counter (half of
its FLOPs). As the paper counts: see polaformer.backbones.published.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polaformer.attention import WindowAttention
from polaformer.attention.layer.gate import LinearGate
from polaformer.backbones import Backbone
from polaformer.backbones.published import PaperRow
from polaformer.backbones.pvt import UnusedNorm

LAYERS = (nn.Linear, nn.Conv2d, nn.LayerNorm, LinearGate)  # whose parameters the paper counts
LAYER_OPERATORS = ("addmm", "mm", "convolution")
MACS_PER_NORM_ELEMENT = 4  # as thop counts a LayerNorm …
MACS_PER_SOFTMAX_ELEMENT = 3  # … and a softmax that is a separate module, as in Swin


class ModelCounts(NamedTuple):
    """Parameters, and MACs for one image."""

    params: int
    macs: int
    paper_params: int
    paper_macs: int


def count(model: Backbone, img_size: tuple[int, int] | None = None) -> ModelCounts:
    """The counts for one image of the model's native size, or of the given (height, width); the model is not changed."""
    image = next(model.parameters()).new_empty(1, model.in_chans, *(img_size or model.img_size))
    return count_pass(model, lambda backbone: backbone(image))


def count_pass(model: nn.Module, forward: Callable[[Any], object]) -> ModelCounts:
    """The counts for a forward pass of any model, which is not changed.

    On the meta device this takes no memory and little time.
    """
    with _count_elements(model) as elements, FlopCounterMode(display=False) as counter, torch.no_grad():
        forward(model)
    macs = {str(operator).rpartition(".")[2]: flops // 2 for operator, flops in counter.get_flop_counts()["Global"].items()}
    in_layers = sum(number for operator, number in macs.items() if operator in LAYER_OPERATORS)
    in_norms = MACS_PER_NORM_ELEMENT * elements["normed"]
    layers = [module for module in model.modules() if isinstance(module, LAYERS) and not isinstance(module, UnusedNorm)]
    return ModelCounts(
        params=sum(parameter.numel() for parameter in model.parameters()),
        macs=sum(macs.values()),
        paper_params=sum(parameter.numel() for layer in layers for parameter in layer.parameters(recurse=False)),
        paper_macs=in_layers + in_norms + MACS_PER_SOFTMAX_ELEMENT * elements["softmax"],
    )


def is_reproduced(row: PaperRow, counts: ModelCounts) -> tuple[bool, bool]:
    """Whether the paper's way of counting gives the printed parameters, and the printed FLOPs, of a row of the paper."""
    return (
        f"{counts.paper_params / 1e6:.{_decimals(row.params)}f}" == row.params,
        f"{counts.paper_macs / 1e9:.{_decimals(row.flops)}f}" == row.flops,
    )


def _decimals(printed: str) -> int:
    return len(printed.partition(".")[2])


@contextmanager
def _count_elements(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count, inside the context, the elements that pass through LayerNorms and through softmax in windows."""
    found = {"normed": 0, "softmax": 0}

    def normed(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found["normed"] += inputs[0].numel()

    def softmax(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        batch, num_heads, num_tokens, _ = output.shape
        found["softmax"] += batch * num_heads * num_tokens**2

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm) and not isinstance(module, UnusedNorm):
                hooks.callback(module.register_forward_hook(normed).remove)
            elif isinstance(module, WindowAttention) and isinstance(module.core, nn.Module):
                hooks.callback(module.core.register_forward_hook(softmax).remove)
        yield found
