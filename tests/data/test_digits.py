"""The bundled digits: one fixed split."""

from pictures import contents, names
from polaformer.data.sources.opening import open_data


def test_the_digits_are_split_once_and_for_all() -> None:
    found = open_data("digits")
    assert (len(found.train), len(found.val), found.classes) == (1437, 360, tuple("0123456789"))
    assert found.val.labels[:12] == [6, 6, 6, 2, 5, 6, 6, 2, 2, 1, 1, 9]
    assert {one.read(0, 1).size for one in (found.train, found.val)} == {(8, 8)}
    assert (names(found.train)[:2], names(found.val)[:2]) == (["train/0", "train/1"], ["test/0", "test/1"])
    assert contents(open_data("digits", val_share=0.5)) == contents(found)


def test_no_digit_is_in_both_parts() -> None:
    found = open_data("digits")
    train, val = ([part.content(index) for index in range(len(part))] for part in (found.train, found.val))
    assert len({*train, *val}) == 1797
    assert not {*train} & {*val}
