"""Windows of tokens against loops over single tokens."""

import pytest
import torch

from polaformer.ops.windows import SHIFT_PENALTY, merge, pad_to_windows, partition, relative_index, shift_bias

SIZES = [((4, 4), 2), ((6, 9), 3), ((5, 5), 5), ((7, 14), 7)]


@pytest.mark.parametrize(("size", "window"), SIZES)
def test_partition_puts_each_token_where_a_loop_does(size, window):
    height, width = size
    image = torch.arange(2 * height * width * 3).reshape(2, height, width, 3)
    windows = partition(image, window)
    assert windows.shape == (2 * (height // window) * (width // window), window * window, 3)
    columns = width // window
    for b in range(2):
        for row in range(height):
            for column in range(width):
                index = (b * (height // window) + row // window) * columns + column // window
                place = (row % window) * window + column % window
                assert torch.equal(windows[index, place], image[b, row, column])
    assert torch.equal(merge(windows, window, size), image)


def test_padding_adds_zeros_below_and_on_the_right_only():
    image = torch.ones(1, 5, 7, 2)
    padded = pad_to_windows(image, 4)
    assert padded.shape == (1, 8, 8, 2)
    assert torch.equal(padded[:, :5, :7], image)
    assert padded.sum() == image.sum()
    assert pad_to_windows(padded, 4) is padded


@pytest.mark.parametrize("window", [1, 2, 5])
def test_relative_index_is_one_row_for_each_offset(window):
    index = relative_index(window)
    tokens = [(row, column) for row in range(window) for column in range(window)]
    for i, (row, column) in enumerate(tokens):
        for j, (other_row, other_column) in enumerate(tokens):
            offset = (row - other_row + window - 1) * (2 * window - 1) + column - other_column + window - 1
            assert index[i, j] == offset


@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (0, 2), (2, 1)])
@pytest.mark.parametrize(("size", "window"), [((6, 9), 3), ((3, 6), 3)])
def test_shift_bias_parts_tokens_that_meet_by_the_cycle_alone(size, window, shift):
    """Two tokens of a window belong together if they are less than a window apart before the shift too."""
    height, width = size
    rows, columns = (torch.arange(length).roll(-by) for length, by in zip(size, shift, strict=True))
    origin = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)[None]  # where each token came from
    windows = partition(origin, window)  # (n, L, 2)
    apart = (windows[:, :, None] - windows[:, None, :]).abs().amax(dim=-1) >= window
    # A window that holds the seam but is as high as the image holds tokens from both ends less than a window apart.
    if height == window and shift[0]:
        seam = (windows[..., 0] < shift[0])[:, :, None] != (windows[..., 0] < shift[0])[:, None, :]
        apart = apart | seam
    if width == window and shift[1]:
        seam = (windows[..., 1] < shift[1])[:, :, None] != (windows[..., 1] < shift[1])[:, None, :]
        apart = apart | seam
    assert torch.equal(shift_bias(size, window, shift) == SHIFT_PENALTY, apart)
    assert set(shift_bias(size, window, shift).unique().tolist()) <= {0.0, SHIFT_PENALTY}
