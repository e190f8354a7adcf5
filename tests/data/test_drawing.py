"""Objects drawn on images."""

from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image

from polaformer.data.colours import class_colours, colour_of, ink_on
from polaformer.data.drawing import Label, _inside, _placed, draw_objects


def plain(width: int = 200, height: int = 120, shade: int = 128) -> Image.Image:
    return Image.new("RGB", (width, height), (shade, shade, shade))


def changed(image: Image.Image, drawn: Image.Image) -> np.ndarray:
    return (np.asarray(image.convert("RGB")) != np.asarray(drawn)).any(axis=2)


def placed(image: Image.Image, boxes: list[list[float]], texts: list[str]) -> dict[int, Label]:
    return _placed(image, texts, [_inside(np.array(box), image.size) for box in boxes], range(len(boxes)))


def luminance(colour: tuple[int, ...]) -> float:
    linear = [((value / 255 + 0.055) / 1.055) ** 2.4 if value / 255 > 0.04045 else value / 255 / 12.92 for value in colour]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_the_frame_stands_on_the_edge_of_the_box_in_the_colour_of_the_class() -> None:
    colours = class_colours(["cat", "dog"])
    drawn = draw_objects(plain(), torch.tensor([[50.0, 40.0, 150.0, 100.0]]), ["dog"], colours=colours)
    pixels = np.asarray(drawn)
    for row, column in ((60, 50), (60, 149), (99, 120), (40, 148)):
        assert tuple(pixels[row, column]) == colours["dog"]
    assert not changed(plain(), drawn)[45:95, 55:145].any()
    assert not changed(plain(), drawn)[:, 152:].any()


def test_the_given_image_stays_as_it_is_and_any_mode_is_drawn_on() -> None:
    for mode in ("RGB", "L", "RGBA", "P", "1"):
        image = plain().convert(mode)
        before = image.tobytes()
        drawn = draw_objects(image, [[5, 5, 90, 90]], ["a"], [0.5])
        assert (drawn.mode, drawn.size) == ("RGB", image.size)
        assert image.tobytes() == before
        assert changed(image, drawn).any()


def test_without_objects_the_image_is_unchanged() -> None:
    assert not changed(plain(), draw_objects(plain(), torch.zeros(0, 4), [], torch.zeros(0), [])).any()


def test_a_mask_is_translucent_with_a_contour_and_holds_no_other_pixel() -> None:
    mask = np.zeros((120, 200), dtype=bool)
    mask[30:90, 60:140] = True
    drawn = draw_objects(plain(), [[60, 30, 140, 90]], ["x"], None, [torch.from_numpy(mask)], {"x": (255, 0, 0)})
    pixels = np.asarray(drawn)
    assert tuple(pixels[60, 60]) == (255, 0, 0)
    assert tuple(pixels[60, 100]) == (179, 77, 77)  # 0.6 · 128 + 0.4 · colour
    label = draw_objects(plain(), [[60, 30, 140, 90]], ["x"], colours={"x": (255, 0, 0)})
    assert not (changed(plain(), drawn) & ~mask & ~changed(plain(), label)).any()


def test_masks_may_be_an_iterator_and_may_be_empty() -> None:
    masks = (np.zeros((120, 200), dtype=np.uint8) for _ in range(2))
    boxes = [[10, 30, 40, 90], [60, 30, 140, 90]]
    with_masks, without = draw_objects(plain(), boxes, "ab", None, masks), draw_objects(plain(), boxes, "ab")
    assert not changed(with_masks, without).any()


@pytest.mark.parametrize(
    "box", [[0, 0, 30, 20], [180, 0, 200, 10], [150, 100, 199, 119], [-50, -50, 500, 500], [190, 110, 400, 300], [5, 5, 5, 5]]
)
def test_labels_are_inside_the_image_wherever_the_box_is(box: list[float]) -> None:
    label = placed(plain(), [box], ["a long name 93 %"])[0]
    left, top, right, bottom = label.ground
    assert 0 <= left < right <= 200
    assert 0 <= top < bottom <= 120
    beside = placed(plain(), [[80, 60, 84, 64]], ["a long name 93 %"])[0].ground  # where nothing is in the way
    assert (right - left, bottom - top) == (beside[2] - beside[0], beside[3] - beside[1])
    drawn = draw_objects(plain(), [box], ["a long name"], [0.93])
    assert changed(plain(), drawn)[top:bottom, left:right].all()


def test_a_name_that_is_wider_than_the_image_is_shortened() -> None:
    drawn = draw_objects(plain(60, 60), [[10, 30, 50, 50]], ["an extremely long name of a class"], [1.0])
    assert changed(plain(60, 60), drawn).any()


def test_labels_of_many_objects_in_a_corner_are_inside_too() -> None:
    for label in placed(plain(), [[0, 0, 20, 9]] * 12, ["a name"] * 12).values():
        assert min(label.ground) >= 0
        assert label.ground[2:] <= (200, 120)


def test_labels_do_not_cover_each_other_where_there_is_room() -> None:
    boxes = [[100, 100, 200, 200], [102, 102, 198, 198], [100, 100, 300, 250], [98, 101, 290, 240]]
    labels = placed(plain(400, 300), boxes, ["first", "second", "third", "fourth"])
    for one, other in combinations([label.ground for label in labels.values()], 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def test_lines_and_text_grow_with_the_image() -> None:
    found = []
    for side in (400, 1600):
        drawn = draw_objects(
            plain(side, side), [[side // 4, side // 4, side // 2, side // 2]], ["x"], colours={"x": (255, 0, 0)}
        )
        line = (np.asarray(drawn)[3 * side // 8, : 3 * side // 8] == (255, 0, 0)).all(axis=1).sum()
        _, top, _, bottom = placed(plain(side, side), [[side // 4, side // 4, side // 2, side // 2]], ["x"])[0].ground
        found.append((int(line), bottom - top))
    assert found[0][0] * 4 == found[1][0] == 8
    assert found[1][1] == pytest.approx(4 * found[0][1], rel=0.1)


def test_small_objects_remain_visible_below_their_frames() -> None:
    image = plain(640, 480)
    drawn = draw_objects(image, [[300, 300, 312, 312]], ["a"])
    assert not changed(image, drawn)[302:310, 302:310].any()


def test_colours_of_few_classes_differ_and_text_is_legible_on_all() -> None:
    colours = list(class_colours([str(index) for index in range(80)]).values())
    assert len(set(colours)) == 80
    for one, other in combinations(colours[:8], 2):
        assert np.abs(np.subtract(one, other)).sum() > 60
    for colour in colours:
        light, dark = sorted((luminance(colour), luminance(ink_on(colour))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 4.5


def test_a_name_has_the_same_colour_in_every_image_and_process() -> None:
    assert colour_of("person") == (174, 126, 0)
    assert len({colour_of(name) for name in ("person", "car", "dog", "cat", "bus")}) == 5


def test_names_that_cannot_be_printed_are_drawn_all_the_same() -> None:
    drawn = draw_objects(plain(), [[20, 40, 90, 90], [100, 40, 190, 90]], ["猫\n\t", "bad \udcff"])
    assert changed(plain(), drawn).any()


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"as many of each, but got \{'boxes': 1, 'names': 2\}"):
        draw_objects(plain(), [[0, 0, 1, 1]], ["a", "b"])
    with pytest.raises(ValueError, match="'scores': 2"):
        draw_objects(plain(), [[0, 0, 1, 1]], ["a"], [0.1, 0.2])
    with pytest.raises(ValueError, match=r"mask 0 has shape \(3, 4\)"):
        draw_objects(plain(), [[0, 0, 1, 1]], ["a"], None, [np.zeros((3, 4))])
    with pytest.raises(ValueError, match="0 masks and 1 boxes"):
        draw_objects(plain(), [[0, 0, 1, 1]], ["a"], None, [])
    with pytest.raises(ValueError, match="must be finite"):
        draw_objects(plain(), [[0, 0, float("nan"), 1]], ["a"])
