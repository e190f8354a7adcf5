"""Anchors and proposals: mmdetection's numbers, and what training ignores."""

import pytest
import torch
from torchvision.models.detection._utils import Matcher

from polaformer.tasks.detection.anchors import Anchors, ObjectMatcher, ignored_anchors, image_list
from polaformer.tasks.detection.proposals import STRIDES, build_proposals
from polaformer.tasks.detection.retinanet import build_retinanet


def anchors_of(generator, *grids):
    return generator(image_list(torch.zeros(1, 3, 1, 1), [(1, 1)]), [torch.zeros(1, 1, *grid) for grid in grids])[0]


def test_anchors_are_mmdetections():
    """The example in its documentation of AnchorGenerator: strides 16 and 32, ratio 1, scale 1, with base sizes of 9 and 18."""
    found = anchors_of(Anchors([16, 32], [9 / 16], [1.0]), (2, 2), (1, 1))
    first = [[-4.5, -4.5, 4.5, 4.5], [11.5, -4.5, 20.5, 4.5], [-4.5, 11.5, 4.5, 20.5], [11.5, 11.5, 20.5, 20.5]]
    assert found.tolist() == [*first, [-9.0, -9.0, 9.0, 9.0]]


def test_retinanets_anchors_have_octave_base_4_three_scales_and_three_ratios_on_strides_8_to_128():
    generator = build_retinanet(8, 2).anchors
    assert generator.strides == (8, 16, 32, 64, 128)
    base = generator.cell_anchors[0]
    sides = base[:, 2:] - base[:, :2]
    assert torch.allclose(sides.prod(dim=1).sqrt().reshape(3, 3), torch.tensor([32.0, 32 * 2 ** (1 / 3), 32 * 2 ** (2 / 3)]))
    assert torch.allclose((sides[:, 1] / sides[:, 0]).reshape(3, 3)[:, 0], torch.tensor([0.5, 1.0, 2.0]))


def test_strides_are_nominal_where_a_level_does_not_divide_the_image():
    """P6 of 800 pixels has 13 cells; torchvision would take a stride of 800 // 13 = 61."""
    found = anchors_of(Anchors([64], [8.0], [1.0]), (13, 13))
    assert found[1, 0] - found[0, 0] == 64


def test_unused_anchors():
    anchors = torch.tensor([[-8.0, -8, 8, 8], [10, 10, 20, 20], [20, 0, 40, 10], [28, 0, 44, 10], [0, 40, 10, 60]])
    size = (48, 32)
    assert ignored_anchors(anchors, size, "all").tolist() == [False] * 5
    assert ignored_anchors(anchors, size, "valid").tolist() == [False, False, False, True, True]
    assert ignored_anchors(anchors, size, "inside").tolist() == [True, False, True, True, True]


def test_an_object_that_overlaps_no_anchor_gets_none():
    overlaps = torch.tensor([[0.0, 0.0, 0.0], [0.6, 0.2, 0.0]])
    assert ObjectMatcher(0.5, 0.4)(overlaps.clone()).tolist() == [1, -1, -1]
    assert Matcher(0.5, 0.4, allow_low_quality_matches=True)(overlaps.clone()).tolist() == [1, 1, 0]


def test_the_best_anchor_of_an_object_counts_only_from_the_least_overlap_on():
    overlaps = torch.tensor([[0.35, 0.1], [0.0, 0.25]])
    assert ObjectMatcher(0.7, 0.3, least=0.3)(overlaps.clone()).tolist() == [0, -1]
    assert ObjectMatcher(0.7, 0.3)(overlaps.clone()).tolist() == [0, 1]


@pytest.mark.parametrize(("use", "sampled"), [("all", 64), ("valid", 16), ("inside", 9)])
def test_proposals_are_trained_on_the_anchors_of_the_image_only(use, sampled):
    """An image of 16×16 pixels in a batch of 32×32: on the first level 8×8 anchors of 4×4 pixels, 4×4 of them of the image."""
    proposals = build_proposals(4, use=use, scale=1.0)
    generator = Anchors(STRIDES[:1], (1.0,), (1.0,))
    (anchors,) = generator(image_list(torch.zeros(1, 3, 32, 32), [(16, 16)]), [torch.zeros(1, 4, 8, 8)])
    empty = {"boxes": torch.zeros(0, 4)}
    labels, _ = proposals._assign([anchors], [(16, 16)], [empty])
    assert (labels[0] == 0).sum() == sampled
    assert (labels[0] == -1).sum() == 64 - sampled
    labels, boxes = proposals._assign([anchors], [(16, 16)], [{"boxes": torch.tensor([[2.0, 2, 6, 6]])}])
    assert (labels[0] == 1).nonzero().tolist() == [[9]]
    assert boxes[0][9].tolist() == [2.0, 2, 6, 6]


def test_objectness_and_l1_of_proposals_are_divided_by_the_number_of_sampled_anchors():
    proposals = build_proposals(4, scale=1.0)
    maps = [torch.randn(1, 4, side, side) for side in (8, 4, 2, 1, 1)]
    _, losses = proposals(torch.zeros(1, 3, 32, 32), maps, [(32, 32)], [{"boxes": torch.tensor([[2.0, 2, 14, 14]])}])
    rpn = proposals.rpn
    objectness, deltas = rpn.head(maps)
    flat = torch.cat([one.permute(0, 2, 3, 1).flatten() for one in objectness])
    moves = torch.cat([one.permute(0, 2, 3, 1).reshape(-1, 4) for one in deltas])
    anchors = rpn.anchor_generator(image_list(torch.zeros(1, 3, 32, 32), [(32, 32)]), maps)
    labels, boxes = proposals._assign(anchors, [(32, 32)], [{"boxes": torch.tensor([[2.0, 2, 14, 14]])}])
    labels, positive = labels[0], labels[0] == 1
    number = min(256, int((labels >= 0).sum()))
    wanted = rpn.box_coder.encode_single(boxes[0][positive], anchors[0][positive])
    assert int(positive.sum()) >= 1
    assert losses["proposal_box"].item() == pytest.approx(((moves[positive] - wanted).abs().sum() / number).item(), rel=1e-5)
    # Random weights give all anchors nearly the same objectness, so the samples hardly matter.
    assert losses["objectness"].item() == pytest.approx(
        torch.nn.functional.binary_cross_entropy_with_logits(flat, labels.clamp(min=0)).item(), rel=0.05
    )
