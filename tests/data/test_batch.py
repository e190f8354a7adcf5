"""Batches of any kind: nested tensors move, change precision, and survive a round trip through a file."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polaformer.data.batch import Batch

CPU, META = torch.device("cpu"), torch.device("meta")


class Box(NamedTuple):
    corners: Tensor
    label: Tensor


@dataclass(frozen=True, kw_only=True)
class Scenes(Batch):
    """As a detector may have them: one tensor for the batch, one dict per image, and plain values."""

    images: Tensor
    targets: list[dict[str, Any]]
    pairs: tuple[Tensor, tuple[Tensor, ...]]
    extra: Any = None


def scenes(**changes: Any) -> Scenes:
    images = torch.randn(2, 3, 4, 4)
    targets = [
        {"boxes": torch.rand(3, 4), "labels": torch.tensor([1, 2, 3]), "crowd": torch.tensor([True, False, True])},
        {"boxes": torch.empty(0, 4), "labels": torch.empty(0, dtype=torch.int64), "crowd": torch.empty(0, dtype=torch.bool)},
    ]
    values = {"images": images, "targets": targets, "pairs": (images[0].permute(2, 1, 0), (images[1], torch.tensor(1.5)))}
    values |= {"extra": {"names": ["a", "b"], "scale": 0.5, "size": (4, 4), "none": None, "empty": {}}}
    return Scenes(**values | {"indices": torch.tensor([7, 3]), "bad": ["x is damaged"]} | changes)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a batch, a list, a dict, …, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Batch):
        return tensors_in([getattr(value, one.name) for one in fields(value)])
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in inside for tensor in tensors_in(one)]


def assert_same(found: Any, wanted: Any) -> None:
    """The same values in containers of the same types."""
    assert type(found) is type(wanted)
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, Batch):
        for one in fields(wanted):
            assert_same(getattr(found, one.name), getattr(wanted, one.name))
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def through_a_file(batch: Scenes, path: Path) -> Scenes:
    tensors, outline = batch.flatten("0")
    save_file(tensors, path, {"outline": json.dumps(outline)})
    return Scenes.unflatten(load_file(path), json.loads(json.dumps(outline)))


def test_every_tensor_moves_however_deep_and_the_indices_stay() -> None:
    moved = scenes().to(META)
    assert moved.indices.device == CPU
    others = tensors_in([moved.images, moved.targets, moved.pairs])
    assert len(others) == 1 + 6 + 3
    assert all(tensor.is_meta for tensor in others)
    assert_same(moved.extra, scenes().extra)


def test_only_floating_point_tensors_change_their_precision() -> None:
    batch = scenes()
    before, after = tensors_in(batch), tensors_in(batch.to(CPU, torch.bfloat16))
    assert {tensor.dtype for tensor in after} == {torch.bfloat16, torch.int64, torch.bool}
    for one, other in zip(before, after, strict=True):
        assert other.dtype == (torch.bfloat16 if one.is_floating_point() else one.dtype)
    assert_same(batch.to(CPU), batch)


def test_a_batch_comes_back_from_a_file_with_its_containers_and_values(tmp_path: Path) -> None:
    batch = scenes()
    assert_same(through_a_file(batch, tmp_path / "batch.safetensors"), batch)


def test_the_parts_of_one_update_lie_in_one_file(tmp_path: Path) -> None:
    parts = [scenes(), scenes(bad=[])]
    stored = [part.flatten(str(number)) for number, part in enumerate(parts)]
    tensors = {name: tensor for found, _ in stored for name, tensor in found.items()}
    assert len(tensors) == sum(len(found) for found, _ in stored)
    save_file(tensors, tmp_path / "parts.safetensors")
    read = load_file(tmp_path / "parts.safetensors")
    for part, (_, outline) in zip(parts, stored, strict=True):
        assert_same(Scenes.unflatten(read, outline), part)


@pytest.mark.parametrize(
    "extra",
    [
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"tensor": torch.ones(1), "dict": {"tuple": (torch.zeros(1),)}},
        [{"tensor": "extra.0"}, ()],
    ],
    ids=["names with points", "names that outlines use", "texts that outlines use"],
)
def test_no_name_in_a_batch_is_mistaken_for_another(extra: Any, tmp_path: Path) -> None:
    batch = scenes(extra=extra)
    assert_same(through_a_file(batch, tmp_path / "batch.safetensors"), batch)


@pytest.mark.parametrize("extra", [{1, 2}, {3: 1}, [Box(torch.rand(4), torch.tensor(1))]], ids=["set", "keys", "named tuple"])
def test_what_no_file_can_hold_is_refused_by_the_first_move(extra: Any) -> None:
    """Not only when the batch is needed because training diverged."""
    batch = scenes(extra=extra)
    for call in (lambda: batch.to(CPU), lambda: batch.flatten("0")):
        with pytest.raises(TypeError, match=r"Scenes\.extra holds a .*; give tensors, numbers, strings"):
            call()


def test_a_batch_of_another_kind_is_not_restored() -> None:
    tensors, outline = scenes().flatten("0")
    with pytest.raises(KeyError, match=r"indices\.0"):
        Scenes.unflatten({}, outline)
    with pytest.raises(TypeError):
        Batch.unflatten(tensors, outline)
