"""The feature pyramid network."""

from collections import OrderedDict

import pytest
import torch
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from polaformer.tasks.dense.fpn import FeaturePyramid


def features(channels, side=16):
    return [torch.randn(2, dim, side >> level, side >> level) for level, dim in enumerate(channels)]


def torchvisions(pyramid, channels, width, extra):
    """torchvision's pyramid with the same parameters."""
    theirs = FeaturePyramidNetwork(channels, width, extra)
    for ours, own in ((pyramid.laterals, theirs.inner_blocks), (pyramid.outputs, theirs.layer_blocks)):
        for one, other in zip(ours, own, strict=True):
            other[0].load_state_dict(one.state_dict())
    return theirs


def test_laterals_top_down_sum_and_outputs_are_torchvisions():
    channels = [4, 6, 8, 10]
    pyramid, given = FeaturePyramid(channels, 12, "pool"), features(channels)
    theirs = torchvisions(pyramid, channels, 12, LastLevelMaxPool())
    expected = theirs(OrderedDict((str(level), one) for level, one in enumerate(given)))
    found = pyramid(given)
    assert len(found) == 5
    for one, other in zip(found, expected.values(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_levels_of_odd_sizes_are_upsampled_to_the_finer_one():
    given = [torch.randn(1, 4, 25, 19), torch.randn(1, 4, 13, 10), torch.randn(1, 4, 7, 5)]
    assert [one.shape[-2:] for one in FeaturePyramid([4, 4, 4], 4, "convolutions")(given)] == [
        (25, 19),
        (13, 10),
        (7, 5),
        (4, 3),
        (2, 2),
    ]


def test_p6_comes_from_c5_also_where_torchvisions_lastlevelp6p7_silently_takes_p5():
    """As with PVTv2-b0, whose C5 has 256 channels, like the pyramid."""
    channels, width = [2, 3, 16], 16
    pyramid, given = FeaturePyramid(channels, width, "convolutions"), features(channels)
    found = pyramid(given)
    assert torch.equal(found[3], pyramid.p6(given[-1]))
    assert torch.equal(found[4], pyramid.p7(found[3]))  # without ReLU in between, as in mmdetection
    extra = LastLevelP6P7(16, width)
    extra.p6.load_state_dict(pyramid.p6.state_dict())
    theirs = torchvisions(pyramid, channels, width, extra)(OrderedDict((str(level), one) for level, one in enumerate(given)))
    assert extra.use_P5
    assert torch.allclose(theirs["p6"], pyramid.p6(found[2]))
    assert not torch.allclose(theirs["p6"], found[3])


@pytest.mark.parametrize("extra", ["pool", "convolutions"])
def test_initial_weights_are_xavier_uniform_and_biases_zero(extra):
    pyramid = FeaturePyramid([64, 32], 64, extra)
    for name, parameter in pyramid.named_parameters():
        if parameter.ndim == 1:
            assert not parameter.any(), name
        else:
            bound = (6 / ((parameter.shape[0] + parameter.shape[1]) * parameter[0, 0].numel())) ** 0.5
            assert 0.98 * bound < parameter.abs().max() <= bound, name


def test_an_unknown_extra_is_refused():
    with pytest.raises(ValueError, match="extra is 'p6'; choose one of none, pool, convolutions"):
        FeaturePyramid([4], 4, "p6")
