"""Rows C3 and D3: order, augmentation and replacement are functions of (seed, epoch, index), for any process."""

import multiprocessing
import random
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polaformer.data.labelled_images import ImageReader, LabelledImages
from polaformer.data.order import EvaluationOrder, Key, Order
from polaformer.data.randomness import derive, reseed, seeded
from polaformer.data.samples import MAX_REPLACEMENTS, Samples, batches
from polaformer.data.sources.arrays import Arrays
from polaformer.data.sources.opening import open_data
from polaformer.data.sources.source import Source
from polaformer.data.transforms import Preprocessing, Transform, training_transform
from polaformer.errors import DataError, ImageError, SettingsError

# More workers than cores, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
NUM_SAMPLES, BATCH_SIZE, SEED = 27, 8, 5
STEPS_OF_THREE_EPOCHS = 9


def all_augmentations() -> Transform:
    """Draws from the generators of Python, NumPy and PyTorch."""
    return training_transform(
        Preprocessing((8, 8), (0.5,) * 3, (0.25,) * 3),
        scale=(0.3, 1.0),
        ratio=(0.8, 1.2),
        hflip=0.5,
        color_jitter=0.4,
        augmentation="rand-m9-mstd0.5-inc1",
        erase_prob=0.5,
        interpolation="random",
    )


def arrays(number: int = NUM_SAMPLES) -> Arrays:
    images = np.random.default_rng(0).integers(0, 256, (number, 9, 10, 3), dtype=np.uint8)
    return Arrays(images, np.arange(number) % 3, ("cat", "dog", "mouse"), "train")


class Broken(Arrays):
    """Some of its images are unusable."""

    bad = (3, 8, 11, 19)

    def __init__(self) -> None:
        whole = arrays()
        super().__init__(whole.images, np.array(whole.labels), whole.classes, whole.split)

    def read(self, index: int, channels: int) -> Image.Image:
        if index in self.bad:
            raise ImageError(f"{self.name(index)} is damaged")
        return super().read(index, channels)


def samples_of(source: Source | None = None, *, seed: int = SEED, on_bad: str = "error", replace: bool = True) -> Samples:
    source = arrays() if source is None else source
    return Samples(ImageReader(source, all_augmentations(), channels=3), seed=seed, on_bad=on_bad, replace=replace)


def taken(
    samples: Samples,
    number: int,
    *,
    first_step: int = 0,
    rank: int = 0,
    world: int = 1,
    accumulation: int = 1,
    num_workers: int = 0,
) -> list[LabelledImages]:
    """The first micro-batches of a process, from a step on."""
    keys = Order(NUM_SAMPLES, BATCH_SIZE, SEED).micro_batches(first_step, rank=rank, world=world, accumulation=accumulation)
    with closing(batches(samples, keys, num_workers=num_workers)) as found:
        return list(islice(found, number))


def assert_equal(some: list[LabelledImages], others: list[LabelledImages]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.indices, other.indices)
        assert one.bad == other.bad


def triples(batch: LabelledImages) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Image, label and index of every sample."""
    return list(zip(batch.images, batch.labels, batch.indices, strict=True))


@pytest.fixture(scope="module")
def three_epochs() -> list[LabelledImages]:
    return taken(samples_of(), STEPS_OF_THREE_EPOCHS)


# Row C3


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_batches_are_bitwise_equal_whatever_the_number_of_workers(num_workers: int, three_epochs: list[LabelledImages]) -> None:
    assert_equal(taken(samples_of(), STEPS_OF_THREE_EPOCHS, num_workers=num_workers), three_epochs)


@pytest.mark.parametrize("first_step", range(STEPS_OF_THREE_EPOCHS))
def test_batches_are_bitwise_equal_whatever_the_step_that_reading_starts_at(
    first_step: int, three_epochs: list[LabelledImages]
) -> None:
    rest = three_epochs[first_step:]
    assert_equal(taken(samples_of(), len(rest), first_step=first_step), rest)


def test_batches_are_bitwise_equal_with_workers_from_the_middle_of_an_epoch(three_epochs: list[LabelledImages]) -> None:
    assert_equal(taken(samples_of(), 4, first_step=4, num_workers=2), three_epochs[4:8])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_processes_and_parts_share_each_update_out_and_change_nothing_in_it(
    world: int, accumulation: int, three_epochs: list[LabelledImages]
) -> None:
    shares = [
        taken(samples_of(), STEPS_OF_THREE_EPOCHS * accumulation, rank=rank, world=world, accumulation=accumulation)
        for rank in range(world)
    ]
    for step, whole in enumerate(three_epochs):
        parts = [part for share in shares for part in share[step * accumulation : (step + 1) * accumulation]]
        assert {len(part.labels) for part in parts} == {BATCH_SIZE // (world * accumulation)}
        found = {int(index): (image, int(label)) for part in parts for image, label, index in triples(part)}
        assert len(found) == BATCH_SIZE
        for image, label, index in triples(whole):
            assert torch.equal(found[int(index)][0], image)
            assert found[int(index)][1] == int(label)


def test_an_image_is_augmented_the_same_way_whatever_was_read_and_drawn_before() -> None:
    samples, others = samples_of(), samples_of()
    first = samples[Key(2, 7)].content.image
    for index in (1, 7, 3):
        others[Key(1, index)]
    reseed(99)
    second = others[Key(2, 7)].content.image
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_every_epoch_every_image_and_every_seed_is_augmented_in_a_way_of_its_own() -> None:
    plain = Arrays(np.tile(arrays().images[:1], (20, 1, 1, 1)), np.zeros(20, int), ("a", "b"), "train")
    keys = [(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(3)]
    found = [samples_of(plain, seed=seed)[Key(epoch, index)].content.image for seed, epoch, index in keys]
    assert len({one.numpy().tobytes() for one in found if one is not None}) == len(keys)


def test_reading_data_draws_from_no_generator_that_training_draws_from() -> None:
    reseed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    for num_workers in (0, 2):
        taken(samples_of(), 2, num_workers=num_workers)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@given(number=st.integers(1, 200), batch_size=st.integers(1, 50), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 3))
def test_law_every_sample_comes_once_an_epoch_but_for_what_fills_no_batch(
    number: int, batch_size: int, seed: int, epoch: int
) -> None:
    order = Order(number, batch_size, seed)
    steps = order.steps_per_epoch
    assert steps == number // batch_size
    drawn = [key for step in range(epoch * steps, (epoch + 1) * steps) for key in order.batch(step)]
    assert len({key.index for key in drawn}) == len(drawn) == steps * batch_size
    assert all(key.epoch == epoch and 0 <= key.index < number for key in drawn)


def test_what_fills_no_batch_is_another_part_every_epoch() -> None:
    order = Order(NUM_SAMPLES, BATCH_SIZE, SEED)
    epochs = [{key.index for step in range(3 * epoch, 3 * epoch + 3) for key in order.batch(step)} for epoch in range(20)]
    assert set.union(*epochs) == set(range(NUM_SAMPLES))
    assert len({frozenset(one) for one in epochs}) == 20


def test_the_order_of_a_seed_is_the_same_in_every_version() -> None:
    """A newer version resumes runs of an older one."""
    assert derive("order", 0, 0) == 4664387070406640777
    assert derive("sample", 5, 2, 7) == 7509062978768857304
    assert [key.index for key in Order(10, 5, 0).batch(0)] == [0, 5, 8, 2, 4]
    assert [key.index for key in Order(10, 5, 1).batch(3)] == [4, 2, 8, 3, 5]


def test_neighbouring_numbers_and_other_names_give_unrelated_seeds() -> None:
    seeds = [derive(name, a, b) for name in ("order", "sample") for a in range(30) for b in range(30)]
    assert len(set(seeds)) == len(seeds)
    assert derive("a", 1, 23) != derive("a", 12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
    differing = [(one ^ other).bit_count() for one, other in pairwise(seeds)]
    assert 29 < np.mean(differing) < 34  # of 63 bits, half


# Row P2's share


@pytest.mark.parametrize("number", [1, 7, 16, 23])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_of_an_evaluation_every_sample_is_in_exactly_one_process(number: int, world: int, batch_size: int) -> None:
    shares = [EvaluationOrder(number, batch_size, rank, world) for rank in range(world)]
    found = [key.index for share in shares for batch in share for key in batch]
    assert sorted(found) == list(range(number))
    for share in shares:
        sizes = [len(batch) for batch in share]
        assert len(share) == len(sizes)
        assert all(size == batch_size for size in sizes[:-1])
        assert all(0 < size <= batch_size for size in sizes)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.parametrize("fails", [False, True])
def test_seeded_starts_all_three_generators_and_puts_them_back(fails: bool) -> None:
    reseed(1)
    expected = [draws(), draws()]
    reseed(1)
    found = [draws()]
    try:
        with seeded(2):
            inside = draws()
            if fails:
                raise KeyError
    except KeyError:
        pass
    found.append(draws())
    assert found == expected
    with seeded(2):
        assert draws() == inside
    with seeded(3):
        assert all(one != other for one, other in zip(draws(), inside, strict=True))


# Row D3


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_a_bad_image_is_replaced_by_the_same_one_whatever_the_number_of_workers(num_workers: int) -> None:
    alone = taken(samples_of(Broken(), on_bad="skip"), STEPS_OF_THREE_EPOCHS)
    assert_equal(taken(samples_of(Broken(), on_bad="skip"), STEPS_OF_THREE_EPOCHS, num_workers=num_workers), alone)


def test_bad_images_are_replaced_counted_and_listed(three_epochs: list[LabelledImages]) -> None:
    found = taken(samples_of(Broken(), on_bad="skip"), STEPS_OF_THREE_EPOCHS)
    replacements = set()
    for batch, whole in zip(found, three_epochs, strict=True):
        assert batch.images.shape == whole.images.shape
        bad = [int(index) for index in whole.indices if int(index) in Broken.bad]
        assert set(batch.bad) >= {f"train/{index} is damaged" for index in bad}  # more if a replacement is bad too
        for place, index in enumerate(whole.indices.tolist()):
            taken_instead = int(batch.indices[place])
            assert taken_instead not in Broken.bad
            assert int(batch.labels[place]) == taken_instead % 3
            if index in Broken.bad:
                replacements.add(taken_instead)
            else:
                assert taken_instead == index
                assert torch.equal(batch.images[place], whole.images[place])
    assert len(replacements) > 3  # not always the same one


def test_a_replacement_depends_on_seed_epoch_and_index() -> None:
    keys = [(seed, epoch, index) for seed in range(4) for epoch in range(4) for index in Broken.bad]
    found = [samples_of(Broken(), seed=seed, on_bad="skip")[Key(epoch, index)].index for seed, epoch, index in keys]
    again = [samples_of(Broken(), seed=seed, on_bad="skip")[Key(epoch, index)].index for seed, epoch, index in keys]
    assert found == again
    assert len(set(found)) > 15


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_an_evaluation_a_bad_image_is_left_out_and_listed(num_workers: int) -> None:
    samples = samples_of(Broken(), on_bad="skip", replace=False)
    found = list(batches(samples, EvaluationOrder(NUM_SAMPLES, 1), num_workers=num_workers))
    assert [index for batch in found for index in batch.indices.tolist()] == [
        index for index in range(NUM_SAMPLES) if index not in Broken.bad
    ]
    assert [line for batch in found for line in batch.bad] == [f"train/{index} is damaged" for index in Broken.bad]
    assert {len(batch.images) for batch in found} == {0, 1}


def test_data_that_are_all_bad_are_given_up_with_the_last_reason() -> None:
    class Hopeless(Broken):
        bad = tuple(range(NUM_SAMPLES))

    with pytest.raises(DataError, match=rf"{MAX_REPLACEMENTS} samples in a row are unusable, .* is damaged; check the data"):
        samples_of(Hopeless(), on_bad="skip")[Key(0, 1)]


@pytest.fixture
def damaged(tmp_path: Path) -> Source:
    """A folder with one damaged image among 24."""
    for part in ("train", "val"):
        for index in range(24):
            path = tmp_path / part / ("cat", "dog")[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9), (index, 0, 0)).save(path)
    (tmp_path / "train" / "dog" / "13.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    return open_data(str(tmp_path)).train


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_bad_image_is_one_error_with_its_path_also_out_of_a_worker(num_workers: int, damaged: Source) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(ImageError) as caught:
        list(batches(samples_of(damaged), EvaluationOrder(len(damaged), 4), num_workers=num_workers))
    assert str(caught.value).endswith("fetch it again, or remove it from the data")
    assert "train/dog/13.png is not a readable image" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_before_a_bad_image_are_whole(num_workers: int, damaged: Source) -> None:
    place = next(index for index in range(24) if "13.png" in damaged.name(index))
    found = batches(samples_of(damaged), EvaluationOrder(len(damaged), 1), num_workers=num_workers)
    assert [int(next(found).indices) for _ in range(place)] == list(range(place))
    with pytest.raises(ImageError):
        next(found)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_end_when_nobody_wants_their_batches_any_more(num_workers: int) -> None:
    before = set(multiprocessing.active_children())
    found = batches(samples_of(), Order(NUM_SAMPLES, BATCH_SIZE, SEED).micro_batches(0), num_workers=num_workers)
    next(found)
    assert len(set(multiprocessing.active_children()) - before) == num_workers
    found.close()
    assert set(multiprocessing.active_children()) == before


# Groups


@st.composite
def grouped_orders(draw: st.DrawFn) -> Order:
    groups = draw(st.lists(st.integers(-1, 3), min_size=1, max_size=80))
    group_size = draw(st.integers(1, 6))
    batch_size = group_size * draw(st.integers(1, 3))
    whole = draw(st.booleans())
    return Order(len(groups), batch_size, draw(st.integers(0, 9)), tuple(groups), None if whole else group_size)


def epoch_of(order: Order, epoch: int) -> list[int]:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    keys = [key for step in steps for key in order.batch(step)]
    assert all(key.epoch == epoch for key in keys)
    return [key.index for key in keys]


@given(order=grouped_orders(), epoch=st.integers(0, 3))
def test_law_chunks_of_a_batch_are_of_one_group_each_and_no_sample_comes_twice(order: Order, epoch: int) -> None:
    assert order.groups is not None
    chunk = order.group_size or order.batch_size
    drawn = epoch_of(order, epoch)
    assert len(drawn) == len(set(drawn)) == order.steps_per_epoch * order.batch_size
    for start in range(0, len(drawn), chunk):
        assert len({order.groups[index] for index in drawn[start : start + chunk]}) == 1


@given(order=grouped_orders(), epoch=st.integers(0, 3))
def test_law_no_more_is_left_out_than_a_chunk_of_each_group_and_a_batch_lack(order: Order, epoch: int) -> None:
    assert order.groups is not None
    chunk = order.group_size or order.batch_size
    left_out = order.num_samples - len(epoch_of(order, epoch))
    assert left_out <= len(set(order.groups)) * (chunk - 1) + order.batch_size - chunk


@given(order=grouped_orders(), epoch=st.integers(0, 3))
def test_law_grouped_batches_are_a_function_of_seed_and_epoch_alone(order: Order, epoch: int) -> None:
    again = Order(order.num_samples, order.batch_size, order.seed, list(order.groups or ()), order.group_size)
    for other in (3, 0, epoch):  # earlier draws have no effect
        found = epoch_of(again, other)
    assert found == epoch_of(order, epoch)


@given(number=st.integers(1, 60), chunk=st.integers(1, 4), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_law_one_group_of_all_samples_changes_nothing(number: int, chunk: int, seed: int, epoch: int) -> None:
    grouped, plain = Order(number, 2 * chunk, seed, [7] * number, chunk), Order(number, 2 * chunk, seed)
    assert epoch_of(grouped, epoch) == epoch_of(plain, epoch)


def test_chunks_come_in_the_order_in_which_the_permutation_fills_them() -> None:
    """The permutation of seed 0 is 0 5 8 2 4 …; of even and odd numbers, 0 and 8 are the first pair."""
    permutation = epoch_of(Order(10, 1, 0), 0)
    order = Order(10, 4, 0, [index % 2 for index in range(10)], 2)
    chunks: list[tuple[int, ...]] = []
    for place, index in enumerate(permutation):
        before = [one for one in permutation[: place + 1] if one % 2 == index % 2]
        chunks += [tuple(before[-2:])] * (len(before) % 2 == 0)
    wanted = [index for chunk in chunks[:4] for index in chunk]
    assert wanted[:2] == [0, 8]
    assert epoch_of(order, 0) == wanted


def test_grouped_batches_are_others_every_epoch() -> None:
    order = Order(64, 8, 0, [index // 32 for index in range(64)], 4)
    assert len({tuple(epoch_of(order, epoch)) for epoch in range(5)}) == 5


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 3 groups for 4 samples; give one per sample"):
        Order(4, 2, 0, [1, 2, 3])
    with pytest.raises(SettingsError, match="batch_size is 4, not a multiple of the group size 3; give a multiple"):
        Order(4, 4, 0, [1] * 4, 3)
    with pytest.raises(ValueError, match="group_size is 2, but there are no groups"):
        Order(4, 4, 0, None, 2)


def test_processes_and_parts_can_have_batches_of_one_group_each() -> None:
    order = Order(64, 8, 0, [index % 3 for index in range(64)], 2)
    for rank in range(2):
        for part in islice(order.micro_batches(0, rank=rank, world=2, accumulation=2), 20):
            assert len({key.index % 3 for key in part}) == 1
