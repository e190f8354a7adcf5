"""The stages of Cascade Mask R-CNN and the heads of all R-CNN detectors."""

import pytest
import torch
from torch import nn
from torchvision.ops import MultiScaleRoIAlign, generalized_box_iou_loss

from detectors import SIZES, batch, describe, targets
from polaformer.tasks.detection import cascade
from polaformer.tasks.detection.description import DetectorDescription
from polaformer.tasks.detection.heads import BoxPredictor, RoIPooler, build_box_head
from polaformer.tasks.detection.job import describe as of_recipe
from polaformer.tasks.detection.recipe import DetectionRecipe
from polaformer.tasks.detection.stage import BoxPredictions, RoIStage, build_stage


def small_stage(**options):
    sizes = {"box_width": 16, "mask_width": 8, "num_samples": 16}
    return build_stage(8, 3, **(sizes | options))


def maps(sides=(24, 24)):
    return {str(level): torch.randn(2, 8, sides[0] >> level, sides[1] >> level) for level in range(4)}


def test_three_stages_with_the_papers_thresholds_and_coder_weights():
    heads = describe("cascade-mask-rcnn").build().heads
    rois = [stage.roi for stage in heads.stages]
    assert (
        [roi.proposal_matcher.high_threshold for roi in rois]
        == [0.5, 0.6, 0.7]
        == [roi.proposal_matcher.low_threshold for roi in rois]
    )
    assert [roi.box_coder.weights for roi in rois] == [(10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15)]
    assert heads.loss_weights == (1.0, 0.5, 0.25)
    assert [stage.beta for stage in heads.stages] == [1.0, 1.0, 1.0]
    assert (heads.proposals.beta, heads.proposals.use) == (1 / 9, "inside")


def test_losses_of_the_stages_are_weighted(monkeypatch):
    detector, given, wanted = describe("cascade-mask-rcnn").build(), batch(), targets()

    def losses():
        torch.manual_seed(3)
        return detector(*given, wanted)

    weighted = losses()
    detector.heads.loss_weights = (1.0, 1.0, 1.0)
    plain = losses()
    for number, weight in enumerate((1.0, 0.5, 0.25), start=1):
        for name in ("class", "box", "mask"):
            assert weighted[f"{name}_{number}"].item() == pytest.approx(weight * plain[f"{name}_{number}"].item())


def test_every_stage_samples_from_the_refined_boxes_of_the_one_before(monkeypatch):
    detector, given = describe("cascade-mask-rcnn").build(), batch()
    taken, refined = [], []
    sample, refine = RoIStage.sample, RoIStage.refine
    monkeypatch.setattr(RoIStage, "sample", lambda self, boxes, *a: taken.append(boxes) or sample(self, boxes, *a))
    monkeypatch.setattr(
        RoIStage,
        "refine",
        lambda self, found, boxes, *a: refined.append((boxes, refine(self, found, boxes, *a))) or refined[-1][1],
    )
    wanted = targets()
    detector(*given, wanted)
    assert len(taken) == 3
    for (sampled, moved), after in zip(refined, taken[1:], strict=False):
        for own, new, kept, target in zip(sampled, moved, after, wanted, strict=True):
            is_object = (own[:, None] == target["boxes"]).all(dim=2).any(dim=1)
            assert is_object.sum() >= 1  # objects' own boxes are samples, but are not refined
            assert torch.equal(kept, new[~is_object])


def test_refinement_moves_boxes_by_the_deltas_of_their_label_or_else_of_the_best_class():
    stage = small_stage()
    boxes = [torch.tensor([[10.0, 10, 30, 30], [10, 10, 30, 30], [40, 40, 60, 60]])]
    logits = torch.tensor([[9.0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]])
    deltas = torch.zeros(3, 4, 4)
    deltas[0, 2, 0], deltas[0, 3, 0] = 5.0, -5.0  # by half a width to the right for class 2, to the left for class 3
    deltas[1, 3, 1] = 5.0
    deltas[2, 1, 0] = 50.0
    found = BoxPredictions(logits, deltas.flatten(1))
    (moved,) = stage.refine(found, boxes, [(64, 64)])
    assert moved.tolist() == [[20, 10, 40, 30], [10, 20, 30, 40], [64, 40, 64, 60]]
    (moved,) = stage.refine(found, boxes, [(64, 64)], torch.tensor([3, 0, 0]))
    assert moved[:2].tolist() == [[0, 10, 20, 30], [10, 20, 30, 40]]


def test_inference_averages_logits_and_masks_over_the_stages(monkeypatch):
    detector, (images, mask, sizes) = describe("cascade-mask-rcnn", score_threshold=0.0).build().eval(), batch()
    logits, masks, given = [], [], []
    for stage in detector.heads.stages:
        stage.roi.box_predictor.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
        stage.roi.mask_predictor.register_forward_hook(lambda module, inputs, output: masks.append(output.sigmoid()))
    last = detector.heads.stages[-1].roi
    decode = last.postprocess_detections
    monkeypatch.setattr(last, "postprocess_detections", lambda *a: given.append(a) or decode(*a))
    with torch.no_grad():
        found = detector(images, mask, sizes)
    assert len(logits) == len(masks) == 3
    assert torch.allclose(given[0][0], sum(logits) / 3)
    labels = torch.cat([one.labels for one in found])
    expected = (sum(masks) / 3)[torch.arange(len(labels)), labels]
    assert len(labels) > 10
    assert torch.allclose(torch.cat([one.masks for one in found])[:, 0], expected, atol=1e-6)


def test_a_class_agnostic_predictor_has_the_same_box_for_all_classes_and_a_quarter_of_the_parameters():
    x = torch.randn(5, 16)
    agnostic, per_class = BoxPredictor(16, 3, class_agnostic=True), BoxPredictor(16, 3)
    logits, deltas = agnostic(x)
    assert logits.shape == (5, 4)
    assert torch.equal(deltas.reshape(5, 4, 4), agnostic.bbox_pred(x)[:, None].expand(5, 4, 4))
    _, deltas = per_class(x)
    assert not deltas[:, :4].any()
    assert torch.equal(deltas[:, 4:], per_class.bbox_pred(x))
    assert agnostic.bbox_pred.weight.numel() * 3 == per_class.bbox_pred.weight.numel()


def test_box_heads_have_two_linear_layers_or_four_convolutions_with_batch_norm_and_one():
    kinds = {
        kind: [
            type(one)
            for one in build_box_head(kind, 8, 16).modules()
            if isinstance(one, nn.Conv2d | nn.Linear | nn.BatchNorm2d)
        ]
        for kind in ("2fc", "4conv1fc")
    }
    assert kinds == {"2fc": [nn.Linear] * 2, "4conv1fc": [nn.Conv2d, nn.BatchNorm2d] * 4 + [nn.Linear]}
    assert build_box_head("4conv1fc", 8, 16)(torch.randn(2, 8, 7, 7)).shape == (2, 16)


def samples_of(stage):
    proposals = [torch.tensor([[4.0, 4, 30, 30], [50, 50, 60, 60]]), torch.tensor([[0.0, 0, 20, 20]])]
    wanted = [
        {
            "boxes": torch.tensor([[5.0, 5, 31, 29]]),
            "labels": torch.tensor([1]),
            "masks": torch.ones(1, *SIZES[0], dtype=torch.uint8),
        },
        {
            "boxes": torch.zeros(0, 4),
            "labels": torch.zeros(0, dtype=torch.int64),
            "masks": torch.zeros(0, *SIZES[1], dtype=torch.uint8),
        },
    ]
    return stage.sample(proposals, SIZES, wanted), wanted


def test_samples_are_labelled_with_1_to_k_and_objects_are_among_them():
    samples, _ = samples_of(small_stage())
    assert [one.tolist() for one in samples.labels] == [[2, 0, 2], [0]]
    assert [one.tolist() for one in samples.is_object] == [[False, False, True], [False]]


@pytest.mark.parametrize("kind", ["l1", "smooth-l1", "giou"])
def test_box_losses(kind):
    stage = small_stage(box_loss=kind)
    samples, wanted = samples_of(stage)
    deltas = torch.randn(4, 4, 4)
    losses = stage.losses(BoxPredictions(torch.zeros(4, 4), deltas.flatten(1)), samples, wanted)
    boxes, own = samples.boxes[0][[0, 2]], deltas[[0, 2], 2]
    truth = wanted[0]["boxes"].expand(2, 4)
    if kind == "giou":
        expected = 10 * generalized_box_iou_loss(stage.roi.box_coder.decode_single(own, boxes), truth, reduction="sum")
    else:
        distance = (own - stage.roi.box_coder.encode_single(truth, boxes)).abs()
        expected = (distance if kind == "l1" else torch.where(distance < 1, distance.square() / 2, distance - 0.5)).sum()
    assert losses["box"].item() == pytest.approx(expected.item() / 4, rel=1e-5)
    assert losses["class"].item() == pytest.approx(torch.tensor(4.0).log().item())


def test_mask_targets_are_rounded_parts_of_the_objects_masks():
    stage = small_stage()
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[1, 10:38, 10:24] = 1
    target = stage._mask_target(masks, torch.tensor([[10.25, 10.25, 38.25, 38.25]]), torch.tensor([1]), 28)
    expected = torch.zeros(1, 28, 28)
    expected[:, :, :14] = 1
    assert torch.equal(target, expected)


def test_regions_come_from_the_level_of_their_size_at_the_nominal_strides():
    """torchvision's pooling without alignment is that of boxes moved by half a cell, on the same levels."""
    sides = (256, 256)
    levels = {str(level): torch.randn(2, 4, sides[0] >> level, sides[1] >> level) for level in range(5)}
    boxes = [
        torch.tensor([[16.0, 16, 64, 80], [100, 100, 300, 340], [0, 0, 1000, 1000]]),
        torch.tensor([[200.0, 20, 420, 520]]),
    ]
    found = RoIPooler(7)(levels, boxes, [(1024, 1024)] * 2)
    pool = MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 0)
    order = [(0, 0, 4), (0, 1, 8), (0, 2, 32), (1, 0, 16)]
    level_of = {4: 2, 8: 3, 16: 4, 32: 5}
    for index, (image, row, _) in enumerate(order):
        box = boxes[image][row]
        level = int(((box[2:] - box[:2]).prod().sqrt() / 224).log2().add(4 + 1e-6).floor().clamp(2, 5))
        stride = 2**level
        assert stride in level_of
        moved = [torch.zeros(0, 4), torch.zeros(0, 4)]
        moved[image] = (box - stride / 2)[None]
        assert torch.allclose(found[index], pool(levels, moved, [(1024, 1024)] * 2)[0], atol=1e-5), index


def test_an_empty_batch_of_regions():
    assert RoIPooler(7)(maps(), [torch.zeros(0, 4), torch.zeros(0, 4)], SIZES).shape == (0, 8, 7, 7)


def published(detector, form):
    """The heads with all values as published: of a description, or of a recipe."""
    description = DetectorDescription(detector=detector, backbone="pola_pvt_tiny", num_classes=80)
    if form == "recipe":
        description = of_recipe(DetectionRecipe(name="test/published", detector=detector), 80)
    with torch.device("meta"):
        return description.build().heads


@pytest.mark.parametrize("form", ["description", "recipe"])
def test_published_constants(form):
    assert (cascade.IOUS, cascade.LOSS_WEIGHTS) == ((0.5, 0.6, 0.7), (1.0, 0.5, 0.25))
    for detector, num_training in (("mask-rcnn", 1000), ("cascade-mask-rcnn", 2000)):
        heads = published(detector, form)
        rpn = heads.proposals.rpn
        assert (rpn.train().pre_nms_top_n(), rpn.post_nms_top_n()) == (2000, num_training)
        assert (rpn.eval().pre_nms_top_n(), rpn.post_nms_top_n()) == (1000, 1000)
        assert (rpn.nms_thresh, rpn.proposal_matcher.high_threshold, rpn.proposal_matcher.low_threshold) == (0.7, 0.7, 0.3)
        assert (rpn.fg_bg_sampler.batch_size_per_image, rpn.fg_bg_sampler.positive_fraction) == (256, 0.5)
        assert rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))  # 8 strides
        for stage in heads.stages if detector == "cascade-mask-rcnn" else [heads.stage]:
            roi = stage.roi
            assert (roi.fg_bg_sampler.batch_size_per_image, roi.fg_bg_sampler.positive_fraction) == (512, 0.25)
            assert (roi.score_thresh, roi.nms_thresh, roi.detections_per_img) == (0.05, 0.5, 100)
    heads = published("retinanet", form)
    assert [sizes[0] for sizes in heads.anchors.sizes] == [32, 64, 128, 256, 512]  # 4 strides
    assert [size / 32 for size in heads.anchors.sizes[0]] == pytest.approx([1, 2 ** (1 / 3), 2 ** (2 / 3)])
    assert (heads.matcher.high_threshold, heads.matcher.low_threshold, heads.candidates) == (0.5, 0.4, 1000)
    assert (heads.score_threshold, heads.nms_threshold, heads.max_detections) == (0.05, 0.5, 100)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("smooth-l1", True)),
        ({"box_head": "4conv1fc"}, ("giou", False)),
        ({"box_head": "4conv1fc", "box_loss": "smooth-l1", "class_agnostic": True}, ("smooth-l1", True)),
        ({"box_loss": "giou"}, ("giou", True)),
    ],
    ids=str,
)
def test_regression_is_class_agnostic_smooth_l1_or_with_4conv1fc_giou_per_class(options, expected):
    for stage in describe("cascade-mask-rcnn", **options).build().heads.stages:
        assert (stage.box_loss, stage.roi.box_predictor.class_agnostic) == expected
