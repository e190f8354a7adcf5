"""Classes of pixels as pictures: overlays with a legend, colours, and files of indices."""

import io

import numpy as np
import pytest
from PIL import Image

from polaformer.data.class_maps import _layout, colour_map, draw_classes, index_png
from polaformer.data.images import decode_values
from polaformer.data.sources.label_sets import ADE20K, CAMVID, IGNORED
from semantic_files import ANIMALS, BLUE, CLASSES, GREEN, RED

COLOURS = ANIMALS.colours


def plain(width: int = 200, height: int = 120, shade: int = 100) -> Image.Image:
    return Image.new("RGB", (width, height), (shade, shade, shade))


def thirds(width: int = 200, height: int = 120) -> np.ndarray:
    """From left to right: a half of class 0, then ignored pixels, then class 2."""
    labels = np.zeros((height, width), dtype=np.uint8)
    labels[:, width // 2 :] = IGNORED
    labels[:, 3 * width // 4 :] = 2
    return labels


def overlay(image: Image.Image, labels: np.ndarray, **options: object) -> np.ndarray:
    return np.asarray(draw_classes(image, labels, CLASSES, COLOURS, **options))  # type: ignore[arg-type]


# Overlays


def test_colours_are_translucent_and_ignored_pixels_stay_as_they_are() -> None:
    found = overlay(plain(), thirds(), legend=False, opacity=0.5)
    assert found.shape == (120, 200, 3)
    assert found[60, 50].tolist() == pytest.approx([178, 50, 50], abs=1)
    assert found[60, 125].tolist() == [100, 100, 100]
    assert found[60, 180].tolist() == pytest.approx([50, 50, 178], abs=1)


def test_contours_have_the_colours_of_the_classes_and_stay_inside_them() -> None:
    found = overlay(plain(), thirds(), legend=False)
    assert (tuple(found[60, 99]), tuple(found[60, 150])) == (RED, BLUE)
    assert (found[:, 100:150] == 100).all()
    wide = overlay(plain(2000, 2000), thirds(2000, 2000), legend=False)
    assert sum(tuple(pixel) == RED for pixel in wide[1000, 900:1000]) == 3


@pytest.mark.parametrize("opacity", [0.0, 1.0])
def test_the_opacity_may_be_nothing_or_all(opacity: float) -> None:
    found = overlay(plain(), np.ones((120, 200), np.uint8), legend=False, opacity=opacity)
    assert (found == (GREEN if opacity else (100, 100, 100))).all()


def test_the_given_image_stays_as_it_is_and_any_mode_is_drawn_on() -> None:
    for mode in ("RGB", "L", "RGBA", "P", "1"):
        image = plain().convert(mode)
        before = image.tobytes()
        drawn = draw_classes(image, thirds(), CLASSES, COLOURS)
        assert drawn.mode == "RGB"
        assert image.tobytes() == before


# Legends


def test_the_legend_shows_the_classes_that_are_there_the_largest_first() -> None:
    labels = thirds()
    labels[:10, :10] = 1
    picture = overlay(plain(), labels)
    assert picture.shape[1] == 200
    legend = picture[120:]
    places = []
    for colour in (RED, BLUE, GREEN):
        rows, columns = np.nonzero((legend == colour).all(axis=2))
        assert len(rows) > 40
        places.append((int(columns.min()) // 20, int(rows.min())))
    assert places == sorted(places)
    assert np.array_equal(picture[:120], overlay(plain(), labels, legend=False))
    without = overlay(plain(), thirds())[120:]
    assert not (without == GREEN).all(axis=2).any()


def test_a_wide_picture_has_its_legend_below_and_a_high_one_beside() -> None:
    wide, high = overlay(plain(400, 200), thirds(400, 200)), overlay(plain(200, 400), thirds(200, 400))
    assert wide.shape[1] == 400
    assert wide.shape[0] > 200
    assert high.shape[0] == 400
    assert high.shape[1] > 200


def test_without_any_class_there_is_no_legend() -> None:
    nothing = np.full((120, 200), IGNORED, dtype=np.uint8)
    assert np.array_equal(overlay(plain(), nothing), np.asarray(plain()))


@pytest.mark.parametrize(("width", "height"), [(1, 1), (8, 8), (5, 300), (300, 5), (640, 480)])
def test_legends_of_many_classes_fit_whatever_the_shape(width: int, height: int) -> None:
    labels = np.arange(width * height).reshape(height, width) % 150
    drawn = draw_classes(plain(width, height), labels.astype(np.uint8), ADE20K.classes, ADE20K.colours)
    number = min(width * height, 150)
    layout = _layout(plain(width, height), number, 15, 8, 100)
    assert layout.rows * layout.columns >= number
    assert drawn.width >= width
    assert drawn.height >= height
    assert min(drawn.size) > 5


def test_names_that_cannot_be_printed_or_are_too_long_are_drawn_all_the_same() -> None:
    names = ("猫\n\t", "bad \udcff", "an extremely long name of a class " * 20)
    drawn = draw_classes(plain(), thirds(), names, COLOURS)
    assert max(drawn.size) < 800


# Maps


def test_a_file_of_indices_has_the_labels_as_values_and_the_colours_as_palette() -> None:
    labels = thirds()
    file = io.BytesIO()
    index_png(labels, COLOURS).save(file, "PNG")
    assert np.array_equal(decode_values(file.getvalue(), "map.png"), labels)
    with Image.open(file) as image:
        assert image.mode == "P"
        colours = np.asarray(image.convert("RGB"))
    assert np.array_equal(colours, np.asarray(colour_map(labels, COLOURS)))
    assert (tuple(colours[0, 0]), tuple(colours[0, 120]), tuple(colours[0, 199])) == (RED, (0, 0, 0), BLUE)


def test_colours_are_labels_again_where_a_label_set_knows_them() -> None:
    labels = np.random.default_rng(0).choice(np.array([*range(11), IGNORED], dtype=np.uint8), (20, 30))
    stored = [colour for colour, label in CAMVID.by_colour.items() if label != IGNORED]
    assert np.array_equal(CAMVID.labels(np.asarray(colour_map(labels, stored))).astype(np.uint8), labels)


def test_parts_of_an_array_are_drawn_as_they_are() -> None:
    labels = np.ascontiguousarray(thirds().T).T[::2, ::-1]
    assert np.array_equal(np.asarray(index_png(labels, COLOURS)), labels)
    assert overlay(plain(200, 60), labels, legend=False).shape == (60, 200, 3)


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the image has 200×120 pixels and the label map shape \(3, 4\)"):
        overlay(plain(), np.zeros((3, 4), np.uint8))
    with pytest.raises(ValueError, match="there are 3 classes, 2 colours"):
        draw_classes(plain(), thirds(), CLASSES, COLOURS[:2])
    with pytest.raises(ValueError, match=r"opacity is 1\.5; give equal sizes and numbers, and an opacity in"):
        overlay(plain(), thirds(), opacity=1.5)
    with pytest.raises(ValueError, match="a label map has label 2, and there are 2 colours; give labels below, or 255"):
        colour_map(thirds(), COLOURS[:2])
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\) and dtype uint8; give \(height, width\) of uint8"):
        index_png(np.zeros((2, 2, 2), np.uint8), COLOURS)
    with pytest.raises(ValueError, match="dtype int64; give"):
        index_png(np.zeros((2, 2), np.int64), COLOURS)
