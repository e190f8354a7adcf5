"""Images of different sizes in one tensor: each keeps its pixels, the rest is zero, and the mask says which is which."""

import pytest
import torch

from polaformer.data.padded_images import pad_images

SIZES = [(5, 9), (33, 1), (32, 64), (1, 1)]


@pytest.mark.parametrize(("multiple", "padded"), [(1, (33, 64)), (32, (64, 64)), (7, (35, 70)), (100, (100, 100))])
def test_every_image_is_in_its_corner_and_the_rest_is_zero(multiple: int, padded: tuple[int, int]) -> None:
    images = [torch.rand(3, *size) + 1 for size in SIZES]
    found = pad_images(images, multiple)
    assert found.images.shape == (4, 3, *padded)
    assert (found.mask.shape, found.mask.dtype, found.sizes) == ((4, *padded), torch.bool, SIZES)
    for image, all_pixels, mask, (height, width) in zip(images, found.images, found.mask, SIZES, strict=True):
        assert torch.equal(all_pixels[:, :height, :width], image)
        assert mask[:height, :width].all()
        assert mask.sum() == height * width
        assert not all_pixels[:, ~mask].any()


def test_the_type_of_the_images_is_kept() -> None:
    assert pad_images([torch.ones(1, 4, 4, dtype=torch.uint8)]).images.dtype == torch.uint8


def test_no_images_are_an_empty_batch() -> None:
    found = pad_images([], 16, channels=1)
    assert (found.images.shape, found.mask.shape, found.sizes) == ((0, 1, 16, 16), (0, 16, 16), [])
