"""The layout of tokens, stage by stage."""

import torch

from polaformer.backbones.token_layout import TokenLayout, pad_to_multiple, pixel_layout


def test_a_token_exists_if_any_of_its_pixels_does():
    exists = torch.zeros(1, 5, 6, dtype=torch.bool)
    exists[0, 1, 1] = exists[0, 4, 2] = True
    shrunk = TokenLayout((5, 6), exists, ((5, 3),)).shrunk(2)
    assert shrunk.grid == (3, 3)
    assert shrunk.exists.tolist() == [[[True, False, False], [False, False, False], [False, True, False]]]
    assert shrunk.sizes == ((3, 2),)


def test_sizes_are_the_extents_of_the_mask():
    mask = torch.zeros(2, 7, 9, dtype=torch.bool)
    mask[0, :4, :6], mask[1, 6, 2], mask[1, 0, 8] = True, True, True
    layout = pixel_layout("test", torch.zeros(2, 3, 7, 9), mask, 3, torch.zeros(1))
    assert layout.sizes == ((4, 6), (7, 9))
    image = layout.cleared(torch.full((2, 3, 7, 9), torch.nan))
    assert image.isnan().sum() == 3 * mask.sum()
    assert not image[:, 0][~mask].any()


def test_prefix_tokens_always_exist():
    mask = torch.zeros(1, 2, 2, dtype=torch.bool)
    assert TokenLayout((2, 2), mask).token_mask(1).tolist() == [[True, False, False, False, False]]
    assert TokenLayout((2, 2)).token_mask(1) is None


def test_padding_to_a_multiple():
    image = torch.ones(1, 1, 5, 8)
    assert pad_to_multiple(image, 4).shape == (1, 1, 8, 8)
    assert pad_to_multiple(image, 4).sum() == image.sum()
    assert pad_to_multiple(image, 1) is image
