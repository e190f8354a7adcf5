"""Inference of segmenters: whole images and windows, scales and flips, and the memory that it takes."""

import pytest
import torch
import torch.nn.functional as F

from polaformer.errors import SettingsError
from polaformer.tasks.segmentation.inference import Inference, classify, positions, segment
from segmenters import SEGMENTERS, build

SIZE = (45, 61)


def picture(height=70, width=98, seed=1):
    return torch.randn(3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stretched(logits, size):
    return F.interpolate(logits[None], size=size, mode="bilinear", align_corners=False)[0]


def pixel_logits(model, image):
    return model.pixel_logits(image[None])[0]


# ---- windows ----


def naive_windows(height, width, window, stride):
    """The corners of all windows, one after the other: the rule of mmsegmentation, in its own words."""
    found = []
    top = 0
    while True:
        bottom = min(top + window, height)
        left = 0
        while True:
            right = min(left + window, width)
            found.append((max(bottom - window, 0), bottom, max(right - window, 0), right))
            if right == width:
                break
            left += stride
        if bottom == height:
            return found
        top += stride


@pytest.mark.parametrize(("window", "stride"), [(32, 32), (32, 20), (40, 7), (64, 64), (33, 31)])
@torch.no_grad()
def test_sliding_windows_are_averaged_as_by_an_explicit_double_loop(window, stride):
    model, image = build(), picture()
    total, number = torch.zeros(5, 70, 98, dtype=torch.float64), torch.zeros(70, 98, dtype=torch.float64)
    for top, bottom, left, right in naive_windows(70, 98, window, stride):
        total[:, top:bottom, left:right] += pixel_logits(model, image[:, top:bottom, left:right])
        number[top:bottom, left:right] += 1
    assert number.min() >= 1
    assert number.max() > 1
    expected = stretched(total / number, SIZE).softmax(dim=0)
    found = segment(model, [image], SIZE, Inference(mode="slide", window=window, stride=stride))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", [1, 31, 32, 33, 52, 53, 64, 100])
@pytest.mark.parametrize(("window", "stride"), [(32, 20), (32, 32), (32, 1)])
def test_windows_cover_every_pixel_and_stay_within_the_image(side, window, stride):
    found = positions(side, window, stride)
    assert {pixel for one in found for pixel in one} == set(range(side))
    assert all(len(one) == min(side, window) for one in found)
    assert len(found) == len(set(found))
    assert [(one.start, one.stop) for one in found] == [
        (left, right) for _, _, left, right in naive_windows(1, side, window, stride)
    ]


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@pytest.mark.parametrize("size", [(64, 64), (64, 40), (37, 61)], ids=str)
def test_slide_is_whole_where_the_window_covers_the_image(segmenter, size):
    model, image = build(segmenter), picture(*size)
    whole = segment(model, [image], SIZE, Inference())
    assert torch.equal(segment(model, [image], SIZE, Inference(mode="slide", window=64, stride=21)), whole)
    assert not torch.equal(segment(model, [image], SIZE, Inference(mode="slide", window=32, stride=21)), whole)


# ---- scales and flips ----


@pytest.mark.parametrize("mode", ["whole", "slide"])
@torch.no_grad()
def test_scales_and_flips_average_probabilities(mode):
    model, views = build(), [picture(35, 49, 2), picture(), picture(123, 172, 3)]
    settings = {"mode": mode, "window": 48, "stride": 30}
    found = segment(model, views, SIZE, Inference(**settings, scales=(0.5, 1.0, 1.75), flip=True))
    expected = []
    for view in views:
        for is_flipped in (False, True):
            own = segment(model, [view.flip(-1) if is_flipped else view], SIZE, Inference(**settings))
            expected.append(own.flip(-1) if is_flipped else own)
    assert len(expected) == 6
    assert torch.allclose(found, sum(expected) / 6, rtol=0, atol=1e-12)
    assert torch.allclose(found.sum(dim=0), torch.ones(SIZE, dtype=torch.float64))


@pytest.mark.parametrize("segmenter", SEGMENTERS)
@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_flip_averaging_is_symmetric(segmenter, mode):
    """The mirror image gets the mirrored result, also where windows do not lie symmetrically."""
    model, image = build(segmenter), picture(50, 70)
    inference = Inference(mode=mode, window=48, stride=30, flip=True)
    found, mirrored = (segment(model, [one], SIZE, inference) for one in (image, image.flip(-1)))
    assert torch.allclose(found, mirrored.flip(-1), rtol=0, atol=1e-12)
    assert not torch.allclose(found, segment(model, [image], SIZE, Inference(mode=mode, window=48, stride=30)))


# ---- results ----


@pytest.mark.parametrize("size", [(70, 98), SIZE, (200, 160), (1, 1)], ids=str)
def test_probabilities_have_the_size_asked_for(size):
    model, image = build(), picture()
    found = segment(model, [image], size, Inference())
    assert torch.allclose(found, stretched(pixel_logits(model, image), size).softmax(dim=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"flip": True}, {"mode": "slide", "window": 16, "stride": 12}, {"scales": (1.0, 0.5)}], ids=str
)
@pytest.mark.parametrize("num_classes", [1, 5, 16, 17, 40, 255])
def test_classes_are_the_most_probable_ones_of_any_number_of_classes(options, num_classes):
    """All of which are the best somewhere, more or less."""
    model, image, inference = build(num_classes=num_classes), picture(33, 45), Inference(**options)
    model.head.register_forward_hook(lambda module, given, logits: logits - logits.mean(dim=(2, 3), keepdim=True))
    views = [image, picture(17, 23)][: len(inference.scales)]
    found = classify(model, views, SIZE, inference)
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, SIZE)
    assert torch.equal(found.long(), segment(model, views, SIZE, inference).argmax(dim=0))
    assert len(found.unique()) >= min(num_classes, 4)


def test_equal_classes_give_the_first_one():
    model, image = build(num_classes=40), picture(32, 32)
    with torch.no_grad():
        model.head.classifier.conv_seg.weight.zero_()
        model.head.classifier.conv_seg.bias.copy_(torch.tensor([0.0] * 3 + [1.0] * 37))
    assert classify(model, [image], SIZE, Inference()).unique().tolist() == [3]


def test_classifying_one_view_takes_the_memory_of_a_few_classes():
    """Of the largest tensor, not of all: 255 classes at 400 × 400 pixels are 326 MB in float64."""
    model, image, largest = build(num_classes=255), picture(32, 32), []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.append(
                max(
                    [one.nbytes for one in (out if isinstance(out, tuple) else [out]) if isinstance(one, torch.Tensor)],
                    default=0,
                )
            )
            return out

    with Watching():
        classify(model, [image], (400, 400), Inference())
    assert max(largest) <= 16 * 400 * 400 * 8


def test_nothing_is_kept_for_backward_and_the_model_is_not_changed():
    model, image = build(), picture()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    assert not segment(model, [image], SIZE, Inference(flip=True)).requires_grad
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(image, picture())


def test_probabilities_are_in_float32_under_bfloat16():
    model, image = build().float(), picture().float()
    expected = segment(model, [image], SIZE, Inference(flip=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = segment(model, [image], SIZE, Inference(flip=True))
    assert found.dtype == torch.float32
    assert (found.bfloat16().float() != found).float().mean() > 0.5
    assert (found - expected).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "tiles"}, "mode is 'tiles'; choose one of whole, slide"),
        ({"window": 0, "stride": 0}, "2 problems"),
        ({"window": 32, "stride": 33}, "stride is 33, but window is 32, so that some pixels are in no window"),
        ({"scales": ()}, r"scales is \(\); give numbers > 0"),
        ({"scales": (1.0, 0.0)}, "give numbers > 0"),
        ({"scales": (float("nan"),)}, "give numbers > 0"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        Inference(**options)


@pytest.mark.parametrize("views", [[torch.zeros(2, 3, 8, 8)], [torch.zeros(3, 8, 8)] * 2, []], ids=["batch", "two", "none"])
def test_anything_but_one_image_per_scale_is_refused(views):
    with pytest.raises(ValueError, match=r"views have shapes .*; give an image \(3, height, width\) for each of \(1.0,\)"):
        segment(build(), views, SIZE, Inference())
