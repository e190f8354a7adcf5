"""The heads of segmenters: their layers, initialisation and numbers of parameters, and what they compute."""

from math import ceil, floor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polaformer.tasks.segmentation.fcn import FCN
from polaformer.tasks.segmentation.layers import ConvolutionNormReLU
from polaformer.tasks.segmentation.semantic_fpn import SemanticFPN
from polaformer.tasks.segmentation.upernet import BINS, UPerNet, bin_means, spread

CHANNELS = (6, 8, 10, 12)
SWIN_TINY = (96, 192, 384, 768)


def features(height=8, width=12, dtype=torch.float64, batch=2):
    """Maps of four strides, the coarsest `height` × `width` divided by 8, rounded up."""
    return [
        torch.randn(batch, dim, -(-height // 2**level), -(-width // 2**level), dtype=dtype)
        for level, dim in enumerate(CHANNELS)
    ]


def randomised(head):
    """In float64 and evaluation mode, with statistics and biases of all kinds."""
    with torch.no_grad():
        for one in head.parameters():
            one.normal_(std=0.2)
        for module in head.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.running_mean.normal_(std=0.2)
                module.running_var.uniform_(0.5, 1.5)
    return head.double().eval()


def by_parts(layer, x):
    """Convolution, batch norm and ReLU by their formulas."""
    norm = layer.bn
    out = F.conv2d(x, layer.conv.weight, padding=layer.conv.kernel_size[0] // 2)
    if norm.training:
        mean, variance = out.mean(dim=(0, 2, 3)), out.var(dim=(0, 2, 3), unbiased=False)
    else:
        mean, variance = norm.running_mean, norm.running_var
    scale = norm.weight / (variance + 1e-5).sqrt()
    return ((out - mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]).clamp(min=0)


def resized(x, size):
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def assert_same(found, expected, inputs):
    """Values and gradients."""
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    slope = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(out, inputs, slope) for out in (found, expected)), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


# ---- published numbers ----


@pytest.mark.parametrize(
    ("build", "printed"), [(SemanticFPN, "4.373"), (UPerNet, "31.497"), (FCN, "0.924")], ids=["semantic-fpn", "upernet", "fcn"]
)
def test_heads_have_mmsegmentations_numbers_of_parameters(build, printed):
    """In millions, for the channels of Swin-T and the 150 classes of ADE20K."""
    with torch.device("meta"):
        number = sum(one.numel() for one in build(SWIN_TINY, 150).parameters())
    assert f"{number / 1e6:.3f}" == printed


# ---- what they compute ----


def test_semantic_fpn_sums_the_levels_at_the_finest_stride():
    head, given = randomised(SemanticFPN(CHANNELS, 5, fpn_width=7, width=4)), features(16, 24)
    inputs = [one.requires_grad_() for one in given]
    levels = head.pyramid(given)
    total = by_parts(head.scale_heads[0][0], levels[0])
    for level in (1, 2, 3):
        own = levels[level]
        assert len(head.scale_heads[level]) == level
        for layer in head.scale_heads[level]:
            own = by_parts(layer, own)
            own = resized(own, (2 * own.shape[2], 2 * own.shape[3]))
        assert own.shape == total.shape
        total = total + own
    classifier = head.classifier.conv_seg
    expected = torch.einsum("kc,bchw->bkhw", classifier.weight[:, :, 0, 0], total) + classifier.bias[:, None, None]
    assert_same(head(given), expected, inputs)


def test_upernet_fuses_the_pooled_top_with_the_finer_maps():
    head, given = randomised(UPerNet(CHANNELS, 5, width=4)), features(16, 24)
    inputs = [one.requires_grad_() for one in given]
    top = given[-1]
    pooled = [
        resized(by_parts(layer, explicit_means(top, bins)), top.shape[2:])
        for bins, layer in zip(BINS, head.psp_modules, strict=True)
    ]
    maps = [by_parts(layer, one) for layer, one in zip(head.lateral_convs, given[:3], strict=True)]
    maps.append(by_parts(head.bottleneck, torch.cat([top, *pooled], dim=1)))
    for fine in (2, 1, 0):
        maps[fine] = maps[fine] + resized(maps[fine + 1], maps[fine].shape[2:])
    finest = given[0].shape[2:]
    fused = [by_parts(head.fpn_convs[level], maps[level]) for level in range(3)] + [maps[3]]
    fused = by_parts(head.fpn_bottleneck, torch.cat([resized(one, finest) for one in fused], dim=1))
    assert_same(head(given), F.conv2d(fused, head.classifier.conv_seg.weight, head.classifier.conv_seg.bias), inputs)


def test_fcn_is_a_convolution_on_the_third_map():
    head, given = randomised(FCN(CHANNELS, 5, width=4)), features()
    own = given[2].requires_grad_()
    classifier = head.classifier.conv_seg
    assert head.stride == 16
    assert_same(head(given), F.conv2d(by_parts(head.convolution, own), classifier.weight, classifier.bias), [own])


def test_batch_norm_in_training_is_over_the_batch():
    layer, x = ConvolutionNormReLU(6, 4, 3).double().train(), features()[0].requires_grad_()
    assert_same(layer(x), by_parts(layer, x), [x, layer.conv.weight])


@pytest.mark.parametrize("build", [SemanticFPN, UPerNet], ids=["semantic-fpn", "upernet"])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (9, 17), (18, 13)], ids=str)
def test_cells_keep_their_place_for_any_number_of_cells(build, size):
    """Logits of an odd number of cells are those of the same cells in the corner of larger maps."""
    head, given = randomised(build(CHANNELS, 5, width=8)), features(*size)
    assert head(given).shape[2:] == size
    multiples = [8 * ceil(side / 8) for side in size]
    larger = [
        F.pad(one, (0, multiples[1] // 2**i - one.shape[3], 0, multiples[0] // 2**i - one.shape[2]))
        for i, one in enumerate(given)
    ]
    sizes = [(4 * size[0], 4 * size[1])] * 2
    assert torch.allclose(head(larger, sizes)[..., : size[0], : size[1]], head(given), rtol=0, atol=1e-10)


# ---- pyramid pooling ----


def explicit_means(maps, bins):
    """The mean of every bin, one after the other."""
    height, width = maps.shape[2:]

    def edges(side):
        return [(floor(i * side / bins), ceil((i + 1) * side / bins)) for i in range(bins)]

    rows = [[maps[:, :, a:b, c:d].mean(dim=(2, 3)) for c, d in edges(width)] for a, b in edges(height)]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


@pytest.mark.parametrize("bins", BINS)
@pytest.mark.parametrize("size", [(6, 6), (16, 16), (7, 11), (1, 4), (2, 64)], ids=str)
def test_pyramid_pooling_takes_the_mean_of_every_bin(bins, size):
    maps = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    assert_same(bin_means(maps, bins, None, 32), explicit_means(maps, bins), [maps])


@pytest.mark.parametrize("bins", BINS)
def test_pyramid_pooling_of_a_padded_batch_is_that_of_each_image(bins):
    sizes, maps = [(100, 160), (200, 33)], torch.randn(2, 3, 7, 5, dtype=torch.float64, requires_grad=True)
    own = [maps[:1, :, :4, :5], maps[1:, :, :7, :2]]  # ⌈size / 32⌉ cells
    assert_same(bin_means(maps, bins, sizes, 32), torch.cat([explicit_means(one, bins) for one in own]), [maps])
    means = torch.randn(2, 4, bins, bins, dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(2, 4, 7, 5, dtype=torch.float64)
    expected[0, :, :4, :5], expected[1, :, :7, :2] = resized(means[:1], (4, 5))[0], resized(means[1:], (7, 2))[0]
    assert_same(spread(means, maps, sizes, 32), expected, [means])


# ---- layers ----


@pytest.mark.parametrize("build", [SemanticFPN, UPerNet, FCN], ids=["semantic-fpn", "upernet", "fcn"])
def test_initial_weights_are_mmsegmentations(build):
    """He's normal distribution over the outputs for convolutions with batch norm, N(0, 0.01²) for the classifier."""
    head = build((64, 64, 64, 64), 20, width=64)
    layers = [module for module in head.modules() if isinstance(module, ConvolutionNormReLU)]
    assert len(layers) >= 1
    for layer in layers:
        assert layer.conv.bias is None
        wanted = (2 / (layer.conv.out_channels * layer.conv.kernel_size[0] ** 2)) ** 0.5
        assert layer.conv.weight.std().item() == pytest.approx(wanted, rel=0.1)
        assert torch.equal(layer.bn.weight, torch.ones(64))
        assert not layer.bn.bias.any()
        assert (layer.bn.eps, layer.bn.momentum) == (1e-5, 0.1)
    assert head.classifier.conv_seg.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert not head.classifier.conv_seg.bias.any()


@pytest.mark.parametrize("build", [SemanticFPN, UPerNet, FCN], ids=["semantic-fpn", "upernet", "fcn"])
def test_dropout_drops_whole_channels_in_training_only(build):
    head, given = build(CHANNELS, 5, width=64, dropout=0.5), features(32, 32, torch.float32)
    seen = []
    head.classifier.conv_seg.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    head.classifier.dropout.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    head.train()(given)
    before, after = seen
    dropped = (after == 0).all(dim=(2, 3)) & (before != 0).any(dim=(2, 3))
    assert 0.3 < dropped.float().mean() < 0.7
    assert torch.equal(after[~dropped], 2 * before[~dropped])
    seen.clear()
    head.eval()(given)
    assert torch.equal(*seen)


def test_upernet_cannot_train_on_one_image():
    head = UPerNet(CHANNELS, 5, width=8).train()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        head(features(32, 32, torch.float32, batch=1))
    head(features(32, 32, torch.float32, batch=2))
