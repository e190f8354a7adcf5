"""The contours of Pathfinder: tables and vectorised steps against plain forms that draw whole images, one contour at a time."""

from math import atan2, ceil, cos, pi, sin
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image, ImageDraw

from polaformer.data.sources.lra import pathfinder_contours as contours
from polaformer.data.sources.lra import pathfinder_stamps as stamps

SIZE = 32


class Snake(NamedTuple):
    """The plain form's state of a contour: everything is in window coordinates, masks are whole images of 0 to 1."""

    pivot: tuple[int, int]
    angle: float
    mask: np.ndarray


def plain_move(point: tuple[int, int], angle: float, distance: float) -> tuple[int, int]:
    return ceil(point[0] + distance * sin(angle)), ceil(point[1] + distance * cos(angle))


def plain_dilate(image: np.ndarray, offsets: list[tuple[int, int]]) -> np.ndarray:
    """The largest value at the offsets from each pixel; outside of the image there is none."""
    height, width = image.shape
    found = np.full_like(image, -np.inf, dtype=float)
    for y in range(height):
        for x in range(width):
            seen = [image[y + a, x + b] for a, b in offsets if 0 <= y + a < height and 0 <= x + b < width]
            found[y, x] = max(seen, default=-np.inf)
    return found


def plain_disc(radius: int) -> list[tuple[int, int]]:
    around = range(-radius, radius + 1)
    return [(y, x) for y in around for x in around if y * y + x * x <= radius * radius]


def plain_stamp(angle: float) -> tuple[np.ndarray, np.ndarray]:
    """The line and the mask of a segment that starts in the middle of 9×9 pixels."""
    canvas = Image.new("L", (17, 17))
    y, x = plain_move((8, 8), angle, 4)
    ImageDraw.Draw(canvas).line([(8, 8), (x, y)], fill=255)
    mask = plain_dilate(np.asarray(canvas), plain_disc(2)).astype(np.uint8)
    return tuple(np.asarray(one.resize((9, 9), Image.LANCZOS)) / 255 for one in (canvas, Image.fromarray(mask)))


def paste(patch: np.ndarray, point: tuple[int, int]) -> np.ndarray:
    """A patch of 9×9 pixels around a point of an empty image, clipped at its border."""
    image = np.zeros((SIZE + 8, SIZE + 8))
    image[point[0] : point[0] + 9, point[1] : point[1] + 9] = patch
    return image[4:-4, 4:-4]


def plain_extend(occupied: np.ndarray, last: Snake, draws: list[float]) -> tuple[np.ndarray, Snake, tuple[int, int]] | None:
    """The extension step of the facts sheet, section 3.3: the new mask of the image, the contour, and its tip."""
    pivot = plain_move(last.pivot, last.angle, 4)
    dilated = plain_dilate(occupied, plain_disc(1))
    candidates = []
    step = 360 / (2 * pi * 3)
    for number in range(ceil(360 / step)):
        y, x = pivot[0] + 3 * sin(number * step * pi / 180), pivot[1] + 3 * cos(number * step * pi / 180)
        if 0 <= y < SIZE and 0 <= x < SIZE:
            candidates.append((int(y), int(x)))
    candidates = sorted(set(candidates))
    angles = [atan2(y - pivot[0], x - pivot[1]) for y, x in candidates]
    turns = [min(abs(angle - last.angle), 2 * pi - abs(angle - last.angle)) for angle in angles]
    weights = [
        (1 - dilated[point]) * max(cos(min(turn, pi / 2)), 0) ** 2 for point, turn in zip(candidates, turns, strict=True)
    ]
    if sum(weights) < 1e-4:
        return None
    cumulative = np.cumsum(weights) / sum(weights)
    for draw in draws:
        chosen = int(np.argmax(cumulative > draw))
        angle, tip = angles[chosen], candidates[chosen]
        mask = paste(plain_stamp(angle + pi if angle < 0 else angle - pi)[1], tip)
        if (occupied + mask).max() < 1.8:
            return np.maximum(occupied, last.mask), Snake(pivot, angle, mask), tip
    return None


def plain_free_tails(occupied: np.ndarray, degrees: int) -> np.ndarray:
    """Which pixels a contour may start at, boolean."""
    kernel = plain_stamp(degrees * pi / 180)[1][:7, :7] == 1
    dilated = plain_dilate(occupied, [(y - 3, x - 3) for y, x in np.argwhere(kernel)])
    if np.ceil(dilated - 0.3).min() < 0:
        return np.zeros((SIZE, SIZE), dtype=bool)
    return np.ceil(dilated - 0.3) == 0


class Draws:
    """In place of a generator: the same number for all contours, another one at each call."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = list(numbers)

    def random(self, size: int) -> np.ndarray:
        return np.full(size, self.numbers.pop(0))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def point_of(position: np.ndarray) -> tuple[int, int]:
    y, x = stamps.coordinates(position)
    return int(y), int(x)


def seed_as_snake(seeds: contours.Contours, index: int) -> Snake:
    angle, tail = (int(seeds.direction[index]) - 180) * pi / 180, point_of(seeds.start[index])
    back = angle + pi if angle < 0 else angle - pi
    pivot = plain_move(plain_move(tail, angle, 2), back, 3)
    return Snake(pivot, angle, paste(plain_stamp(angle)[1], tail))


@pytest.mark.parametrize("degrees", range(-180, 180, 15))
def test_stamps_of_whole_degrees_are_those_of_the_plain_form(degrees):
    line, mask = plain_stamp(degrees * pi / 180)
    assert np.array_equal(np.rint(line * 255).ravel(), stamps.LINES[degrees + 180])
    assert np.array_equal(np.rint(mask * 255).ravel(), stamps.MASKS[degrees + 180])


def test_a_contour_continues_in_eighteen_directions():
    assert len(stamps.CIRCLE) == 18
    assert stamps.LINES.shape == stamps.MASKS.shape == (378, 81)


def test_seeds_are_those_of_the_plain_form():
    for seeds in contours.seed_pairs(100, generator()):
        for index in range(100):
            snake = seed_as_snake(seeds, index)
            assert point_of(seeds.pivot[index]) == snake.pivot
            assert np.array_equal(np.rint(snake.mask * 255), stamps.window(entered(seeds.at(np.array([index]))))[0])


def entered(seeds: contours.Contours) -> np.ndarray:
    occupied = np.zeros((1, stamps.AREA), dtype=np.uint8)
    contours.enter(occupied, seeds._replace(canvas=np.array([0])))
    return occupied


def test_the_first_seed_is_in_the_middle_and_the_second_seven_pixels_away():
    first, second = contours.seed_pairs(3000, generator())
    tails, others = (np.stack(stamps.coordinates(seeds.start)) for seeds in (first, second))
    assert tails.min() >= 13
    assert tails.max() <= 17
    distance = np.sqrt(((tails - others) ** 2).sum(0))
    assert distance.min() > 6.2
    assert distance.max() < 7.8
    assert set(np.unique(first.direction - 180)) == set(range(-150, -120))
    assert len(np.unique(second.direction)) > 350


def test_the_vectorised_extension_step_equals_the_plain_one():
    """Twenty pairs of contours grow on their canvases at the same time, and one by one."""
    number, random = 20, generator(5)
    growing = list(contours.seed_pairs(number, random))
    occupied = np.tile(stamps.EMPTY, (number, 1))
    border = np.ones((SIZE, SIZE))
    border[1:-1, 1:-1] = 0
    images = [border for _ in range(number)]
    snakes = [[seed_as_snake(seeds, index) for index in range(number)] for seeds in growing]
    alive, steps, failures = list(range(number)), 0, 0
    for _ in range(9):
        for one in (0, 1):
            draws = random.random(3).tolist()
            tries = Draws(draws)
            there, grown = contours.extend(occupied, growing[one], tries)
            assert not tries.numbers
            plain = {index: plain_extend(images[index], snakes[one][index], draws) for index in alive}
            survivors = [index for index in alive if plain[index] is not None]
            assert grown.canvas.tolist() == survivors
            assert [alive[index] for index in there] == survivors
            for row, index in enumerate(survivors):
                images[index], snakes[one][index], tip = plain[index]
                assert point_of(grown.start[row]) == tip
                assert point_of(grown.pivot[row]) == snakes[one][index].pivot
                assert np.array_equal(np.rint(images[index] * 255), stamps.window(occupied)[index])
            steps, failures = steps + len(alive), failures + len(alive) - len(survivors)
            growing[one], growing[1 - one], alive = grown, growing[1 - one].at(there), survivors
    assert steps > 150
    assert failures >= 2


def test_rounding_up_depends_on_the_coordinate():
    """sin π is not quite 0: what is added near the edge of the window is lost elsewhere."""
    left = 180 + 180 - 360  # −180 degrees, whose sine is below 0
    assert point_of(stamps.move(stamps.position(np.array(4), np.array(9)), np.array(left), 4)) == (4, 5)
    onwards = 360 + [tuple(one) for one in stamps._CANDIDATES].index((0, -3))  # π
    for y, reached in ((4, 5), (20, 20)):
        moved = stamps.move(stamps.position(np.array(y), np.array(9)), np.array(onwards), 4)
        assert point_of(moved) == (reached, 5) == plain_move((y, 9), pi, 4)


@pytest.mark.parametrize("degrees", [-180, -150, -136, -121, -120, -90, 0, 45])
def test_the_pixels_that_a_contour_may_start_at_are_those_of_the_plain_form(degrees):
    pairs = contours.grow_pairs(2, 6, generator(1))
    for occupied in pairs.occupied:
        found = contours.free_tails(occupied[None], np.array([degrees + 180]))[0].reshape(SIZE, SIZE)
        assert np.array_equal(found, plain_free_tails(stamps.window(occupied) / 255, degrees))


def test_contours_can_start_in_thirty_directions_only():
    empty = np.tile(stamps.EMPTY, (360, 1))
    found = contours.free_tails(empty, np.arange(360)).any(1)
    assert np.flatnonzero(found).tolist() == list(range(30, 60))  # −150 to −121 degrees


def test_pairs_have_all_their_segments_inside_the_border():
    pairs = contours.grow_pairs(30, 14, generator())
    assert pairs.occupied.shape == (30, stamps.AREA)
    for contour in (pairs.first, pairs.second):
        assert contour.start.shape == contour.direction.shape == (30, 14)
        y, x = stamps.coordinates(contour.start[:, 1:])
        assert min(y.min(), x.min()) >= 2
        assert max(y.max(), x.max()) <= 29
    outside = pairs.occupied[:, ~stamps.INSIDE]
    assert not outside.any()


def occupied_by(contour: contours.Segments, image: int) -> np.ndarray:
    """What the segments of a contour occupy together."""
    segments = zip(contour.start[image], contour.direction[image], strict=True)
    masks = [paste(stamps.MASKS[direction].reshape(9, 9), point_of(start)) for start, direction in segments if start >= 0]
    return np.max([np.zeros((SIZE, SIZE)), *masks], axis=0)


def test_a_canvas_holds_every_segment_but_the_last_of_the_first_contour():
    pairs = contours.grow_pairs(5, 9, generator())
    for image in range(5):
        without_last = contours.Segments(*(part[:, :-1] for part in pairs.first))
        parts = stamps.window(stamps.EMPTY), occupied_by(without_last, image), occupied_by(pairs.second, image)
        assert np.array_equal(stamps.window(pairs.occupied[image]), np.max(parts, axis=0))
        assert (occupied_by(pairs.first, image) > np.max(parts, axis=0)).any()


def test_a_canvas_holds_every_segment_of_distractors():
    pairs = contours.grow_pairs(30, 9, generator())
    before = stamps.window(pairs.occupied.copy())
    added = contours.add_distractors(pairs.occupied, 3, generator(1))
    for image in range(30):
        parts = before[image], *(occupied_by(contour, image) for contour in added)
        assert np.array_equal(stamps.window(pairs.occupied[image]), np.max(parts, axis=0))


def test_distractors_occupy_what_was_free_and_most_are_left_out():
    pairs = contours.grow_pairs(200, 14, generator())
    before = pairs.occupied.copy()
    added = contours.add_distractors(pairs.occupied, 4, generator(1))
    assert len(added) == 5
    is_there = np.stack([contour.start[:, 0] >= 0 for contour in added])
    assert 0.2 < is_there.mean() < 0.45
    for contour in added:
        complete = (contour.start >= 0).all(1)
        assert np.array_equal(complete, (contour.start >= 0).any(1))
    changed = (pairs.occupied != before).any(1)
    assert np.array_equal(changed, is_there.any(0))
    assert (pairs.occupied >= before).all()


@pytest.mark.parametrize(("length", "wanted", "number"), [(14, 298, 200), (9, 80, 100), (6, 22, 100)])
def test_as_many_attempts_succeed_as_of_the_original(length, wanted, number):
    """Section 3.5. An attempt of the original begins with a direction out of 360, of which 30 are possible."""
    attempts = 6000 if length == 14 else 2000
    succeeded = len(contours.attempt_pairs(attempts, length, generator(2)).occupied)
    found = attempts / succeeded * 360 / 30
    assert abs(found / wanted - 1) < 3 * np.sqrt(1 / number + 1 / succeeded)
