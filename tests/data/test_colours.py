"""Colours of classes: the first ones are far apart, and all differ."""

import numpy as np
import pytest

from polaformer.data.colours import ink_on, oklab, spread_colours
from polaformer.data.sources.label_sets import ADE20K, CAMVID


def least_distance(colours: list[tuple[int, int, int]]) -> float:
    places = oklab(np.array(colours))
    apart = np.linalg.norm(places[:, None] - places, axis=2)
    return float(apart[~np.eye(len(colours), dtype=bool)].min())


def test_oklab_has_the_known_values_of_white_and_red() -> None:
    white, red = oklab(np.array([(255, 255, 255), (255, 0, 0)]))
    assert white == pytest.approx((1, 0, 0), abs=1e-4)
    assert red == pytest.approx((0.62796, 0.22486, 0.12585), abs=1e-4)


def test_colours_are_as_far_apart_as_their_number_allows() -> None:
    for number, least in ((6, 0.25), (20, 0.12), (150, 0.05), (255, 0.03)):
        assert least_distance(spread_colours(number)) > least
    assert spread_colours(20) == spread_colours(255)[:20]
    assert spread_colours(0) == []


def test_fixed_colours_stay_and_others_keep_away_from_them() -> None:
    fixed = {0: (0, 0, 255), 7: (0, 180, 0)}
    found = spread_colours(12, fixed)
    assert {index: found[index] for index in fixed} == fixed
    assert least_distance(found) > 0.15


def test_colours_of_the_built_in_label_sets_can_be_told_apart() -> None:
    assert least_distance(list(CAMVID.colours)) > 0.1
    assert least_distance(list(ADE20K.colours[:40])) > 0.07
    assert least_distance(list(ADE20K.colours)) > 0.04
    lightness = oklab(np.array([*ADE20K.colours, *CAMVID.colours]))[:, 0]
    assert lightness.min() > 0.4  # seen over a dark image too


def test_ink_is_black_on_light_and_white_on_dark() -> None:
    assert (ink_on((255, 255, 0)), ink_on((0, 0, 120))) == ((0, 0, 0), (255, 255, 255))
