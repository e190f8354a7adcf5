"""What values in masks mean: built in, or in a file whose every mistake is named with its line."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arena import shared
from pictures import refused
from polaformer.data.sources.label_sets import ADE20K, CAMVID, IGNORED, LabelSet, find_label_set, read_label_set
from polaformer.data.sources.semantic import open_semantic
from polaformer.errors import DataError
from semantic_files import ANIMALS, BLUE, CLASSES, GREEN, LINES, RED, WHITE, write_pairs


def written(root: Path, text: str | bytes) -> Path:
    path = root / "classes.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def grid(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.int64)


# Built in


def test_ade20k_has_the_150_classes_of_sceneparse150_and_ignores_the_rest() -> None:
    assert (len(ADE20K.classes), len(set(ADE20K.classes)), len(set(ADE20K.colours))) == (150, 150, 150)
    assert (ADE20K.classes[0], ADE20K.classes[44], ADE20K.classes[149]) == ("wall", "chest of drawers", "flag")
    assert ADE20K.labels(grid(0, 1, 150, 151, 255)).tolist() == [[IGNORED, 0, 149, -1, -1]]


def test_ade20k_names_are_the_first_synonyms_of_its_list() -> None:
    rows = (shared("ade20k-samples") / "objectInfo150.txt").read_text().splitlines()[1:]
    assert ADE20K.classes == tuple(row.split("\t")[4].split(",")[0].strip() for row in rows)


def test_camvid_has_the_11_classes_of_segnet_and_ignores_void() -> None:
    names = "sky building pole road pavement tree sign fence car pedestrian bicyclist"
    assert CAMVID.classes == tuple(names.split())
    assert CAMVID.labels(grid(*range(13))).tolist() == [[*range(11), IGNORED, -1]]
    colours = np.array([[(128, 128, 128), (0, 128, 192), (0, 0, 0), (1, 2, 3)]], dtype=np.uint8)
    assert CAMVID.labels(colours).tolist() == [[0, 10, IGNORED, -1]]


def test_label_sets_load_without_pytorch() -> None:
    code = "import sys, polaformer.data.sources.label_sets; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Files


def test_a_file_gives_classes_colours_values_and_what_is_ignored(tmp_path: Path) -> None:
    assert read_label_set(written(tmp_path, LINES)) == ANIMALS
    found = read_label_set(written(tmp_path, "\ufeff# animals\r\n\r\n7 traffic light\r\n  65535   #0A0b0c  dog \r\n3 -\r\n"))
    assert found.classes == ("traffic light", "dog")
    assert found.colours[1] == (10, 11, 12)
    assert found.values == {7: 0, 65535: 1, 3: IGNORED}
    assert found.by_colour == {(10, 11, 12): 1}  # nobody wrote down the colour of the other


def test_lines_with_the_same_name_are_one_class(tmp_path: Path) -> None:
    found = read_label_set(written(tmp_path, "4 car\n1 dog\n5 #ff0000 car\n6 #00ff00 car\n"))
    assert (found.classes, found.colours[0]) == (("car", "dog"), RED)
    assert (found.values, found.by_colour) == ({4: 0, 1: 1, 5: 0, 6: 0}, {RED: 0, GREEN: 0})


def test_255_classes_are_read_and_their_colours_differ(tmp_path: Path) -> None:
    found = read_label_set(written(tmp_path, "\n".join(f"{value} class {value}" for value in range(1, 256))))
    assert (len(found.classes), len(set(found.colours)), found.labels(grid(255, 0)).tolist()) == (255, 255, [[254, -1]])


BAD_LINES: dict[str, tuple[str | bytes, str]] = {
    "no name": ("0 cat\n1\n", "classes.txt, line 2 is '1', without a name; write VALUE NAME or VALUE #RRGGBB NAME"),
    "a colour and no name": ("0 #ff0000\n", "line 1 is '0 #ff0000', without a name"),
    "no value": ("0 cat\ndog two\n", "line 2 begins with 'dog', which is no value from 0 to 65535; write VALUE"),
    "a negative value": ("-1 cat\n", "line 1 begins with '-1', which is no value"),
    "a broken value": ("1.5 cat\n", "line 1 begins with '1.5', which is no value"),
    "a large value": ("65536 cat\n", "line 1 begins with '65536', which is no value from 0 to 65535"),
    "an enormous value": (f"{'9' * 5000} cat\n", "which is no value from 0 to 65535"),
    "digits of another script": ("٣ cat\n", "line 1 begins with '٣', which is no value"),
    "a value twice": ("0 cat\n\n0 dog\n", "line 3 gives value 0 a second meaning; leave one"),
    "a short colour": ("0 #f00 cat\n", "line 1 has '#f00', which is no colour; write six hexadecimal digits, such as #8040ff"),
    "a colour of no digits": ("0 #gg0000 cat\n", "line 1 has '#gg0000', which is no colour"),
    "a colour twice": (
        "0 #ff0000 cat\n1 #FF0000 dog\n",
        "line 2 has the colour of another class, #FF0000; give each",
    ),
    "one class": ("0 cat\n1 -\n", "classes.txt names 1 class; name at least two"),
    "nothing": ("# nothing\n", "classes.txt names 0 classes; name at least two"),
    "256 classes": (
        "\n".join(f"{value} class {value}" for value in range(256)),
        "line 256 is class 256; at most 255 are allowed; merge some, by the same name",
    ),
    "no text": (b"0 caf\xe9\n", "classes.txt cannot be read as a list of classes: it is not UTF-8 text; write VALUE NAME"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_mistake_in_a_file_is_one_error_with_its_line(name: str, tmp_path: Path) -> None:
    text, told = BAD_LINES[name]
    with refused(told):
        read_label_set(written(tmp_path, text))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with refused("gone.txt cannot be read as a list of classes: No such file or directory"):
        read_label_set(tmp_path / "gone.txt")
    with refused("cannot be read as a list of classes: it is not a regular file"):
        read_label_set(tmp_path)
    (tmp_path / "large.txt").write_bytes(bytes(2**20 + 1))
    with refused("it has 1,048,577 bytes, more than the 1,048,576 allowed"):
        read_label_set(tmp_path / "large.txt")


# Which label set


def test_an_option_names_a_built_in_label_set_or_a_file(tmp_path: Path) -> None:
    assert find_label_set("ade20k", tmp_path) is ADE20K
    assert find_label_set("camvid", tmp_path) is CAMVID
    assert find_label_set(str(written(tmp_path, LINES)), tmp_path / "elsewhere") == ANIMALS
    with refused("there is no label set 'ade20' (--label-set); did you mean 'ade20k'? give ade20k, camvid, or a file"):
        find_label_set("ade20", tmp_path)


def test_without_an_option_the_data_tell(tmp_path: Path) -> None:
    with refused("does not tell what the values in its masks mean; add classes.txt with a line `VALUE NAME` per value, or"):
        find_label_set(None, tmp_path)
    assert find_label_set(None, tmp_path, ["ADE_train_00000036.png", "ADE_val_00000001.png"]) is ADE20K
    assert find_label_set(None, tmp_path, ["0001TP_006690.png", "0016E5_07959.png", "Seq05VD_f00000.png"]) is CAMVID
    written(tmp_path, LINES)
    found = find_label_set(None, tmp_path, ["ADE_train_00000036.png"])
    assert (found, found.name, found.reordered(CLASSES[::-1]).name) == (ANIMALS, *[f"{tmp_path}/classes.txt"] * 2)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "objectInfo150.txt").touch()
    assert find_label_set(None, tmp_path / "samples") is ADE20K


@pytest.mark.parametrize("folders", [("images/training", "annotations/training"), ("train", "trainannot")], ids=str)
def test_own_masks_in_the_folders_of_others_are_not_read_as_theirs(folders: tuple[str, str], tmp_path: Path) -> None:
    images, masks = (tmp_path / folder for folder in folders)
    write_pairs(images, masks, ["a", "ADE_train_00000001", "0001TP_006690"])
    with refused("does not tell what the values in its masks mean; add classes.txt"):
        open_semantic(str(tmp_path), val_share=0)
    assert open_semantic(str(tmp_path), label_set="ade20k", val_share=0).train.label_set.name == "ade20k"


# Labels


def test_labels_of_values_and_of_colours_are_those_of_a_lookup_one_by_one() -> None:
    draw = np.random.default_rng(0)
    values = draw.choice([0, 1, 2, 9, 3, 255, 256, 65535], (5, 7))
    assert ANIMALS.labels(values).tolist() == [[ANIMALS.values.get(one, -1) for one in row] for row in values.tolist()]
    colours = np.array([RED, GREEN, BLUE, WHITE, (0, 0, 0), (255, 0, 1)], dtype=np.uint8)[draw.integers(0, 6, (5, 7))]
    wanted = [[ANIMALS.by_colour.get(tuple(one), -1) for one in row] for row in colours.tolist()]
    assert ANIMALS.labels(colours).tolist() == wanted
    without = LabelSet(CLASSES, ANIMALS.colours, ANIMALS.values, {})
    assert (without.labels(colours) == -1).all()
    own = LabelSet(CLASSES, ANIMALS.colours, ANIMALS.values)
    assert own.by_colour == {RED: 0, GREEN: 1, BLUE: 2}


def test_values_out_of_range_are_unknown_even_beside_the_largest_one() -> None:
    largest = LabelSet(CLASSES, ANIMALS.colours, {65535: 0, 0: 1, 1: 2})
    assert largest.labels(grid(65535, -2, -1, 65536, 2**40, -(2**40))).tolist() == [[0, -1, -1, -1, -1, -1]]


def test_an_empty_mask_has_no_labels() -> None:
    assert ANIMALS.labels(np.empty((0, 4), dtype=np.uint8)).shape == (0, 4)
    assert ANIMALS.labels(np.empty((0, 4, 3), dtype=np.uint8)).shape == (0, 4)


def test_the_order_of_a_trained_model_reorders_labels_and_colours() -> None:
    found = ANIMALS.reordered(("mouse", "cat", "dog"))
    assert (found.classes, found.colours) == (("mouse", "cat", "dog"), (BLUE, RED, GREEN))
    assert (found.values, found.by_colour[BLUE], found.by_colour[WHITE]) == ({0: 1, 1: 2, 2: 0, 9: IGNORED}, 0, IGNORED)
    assert found.reordered(CLASSES) == ANIMALS
    with refused("the masks have other classes than the model: they lack 'ox' and add 'cat'; give the label set of the model"):
        ANIMALS.reordered(("mouse", "ox", "dog"))


BAD: dict[str, dict[str, Any]] = {
    "one class": {"classes": ("cat",), "colours": (RED,), "values": {0: 0}},
    "a name twice": {"classes": ("cat", "dog", "cat")},
    "too few colours": {"colours": (RED, GREEN)},
    "a label too many": {"values": {0: 3}},
    "a negative label": {"values": {0: -1}},
    "a negative value": {"values": {-1: 0}},
    "a large value": {"values": {65536: 0}},
    "a colour of no class": {"decoded": {RED: 3}},
}


@pytest.mark.parametrize("name", BAD)
def test_label_sets_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"a label set (has|maps) .*; give "):
        LabelSet(**{"classes": CLASSES, "colours": (RED, GREEN, BLUE), "values": {0: 0}} | BAD[name])
