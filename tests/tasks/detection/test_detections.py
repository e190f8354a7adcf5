"""Masks of whole images, and detections in the original image."""

import torch
from torch.nn import functional as F

from polaformer.tasks.detection.detector import Detections, paste_masks, rescaled


def test_a_pasted_mask_is_sampled_at_the_centres_of_pixels():
    """Against one interpolation of the whole image, as mmdetection does on GPUs."""
    masks, boxes = torch.rand(6, 1, 28, 28), torch.rand(6, 4) * 20
    boxes[:, 2:] += boxes[:, :2] + 15
    boxes[0] = torch.tensor([-5.0, -3, 70, 90])
    height, width = 48, 60
    x = (torch.arange(width) + 0.5 - boxes[:, :1]) / (boxes[:, 2:3] - boxes[:, :1]) * 2 - 1
    y = (torch.arange(height) + 0.5 - boxes[:, 1:2]) / (boxes[:, 3:] - boxes[:, 1:2]) * 2 - 1
    grid = torch.stack([x[:, None].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], dim=-1)
    expected = F.grid_sample(masks, grid, align_corners=False)[:, 0] >= 0.5
    found = paste_masks(masks, boxes, (height, width))
    assert found.dtype == torch.bool
    assert found.shape == (6, height, width)
    assert torch.equal(found, expected)


def test_a_full_mask_fills_its_box_to_half_a_pixel():
    (found,) = paste_masks(torch.ones(1, 1, 28, 28), torch.tensor([[10.0, 20.0, 30.6, 40.4]]), (64, 64))
    rows, columns = found.any(dim=1).nonzero(), found.any(dim=0).nonzero()
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (20, 39, 10, 30)


def test_degenerate_boxes_and_boxes_outside_paste_nothing():
    boxes = torch.tensor([[5.0, 5, 5, 9], [70, 70, 90, 90], [-9, -9, -2, -2], [float("nan"), 0, 4, 4]])
    assert not paste_masks(torch.ones(4, 1, 28, 28), boxes, (32, 32)).any()
    assert paste_masks(torch.ones(0, 1, 28, 28), torch.zeros(0, 4), (32, 32)).shape == (0, 32, 32)


def test_half_precision_masks_are_pasted_in_float32():
    box = torch.tensor([[500.25, 4, 520.75, 20]])
    masks = torch.rand(1, 1, 28, 28).bfloat16()
    assert torch.equal(paste_masks(masks, box, (32, 600)), paste_masks(masks.float(), box, (32, 600)))


def test_rescaled_boxes_are_in_the_original_image():
    masks = torch.rand(1, 1, 28, 28)
    found = rescaled(
        Detections(torch.tensor([[10.0, 20, 50, 100]]), torch.ones(1), torch.zeros(1), masks), (100, 50), (201, 75)
    )
    assert torch.allclose(found.boxes, torch.tensor([[15.0, 40.2, 75, 201]]))
    assert torch.equal(found.masks, masks)
    beyond = rescaled(Detections(torch.tensor([[-1.0, 0, 50.5, 100]]), torch.ones(1), torch.zeros(1)), (100, 50), (201, 75))
    assert beyond.boxes.tolist() == [[0, 0, 75, 201]]
