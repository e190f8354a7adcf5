"""Window attention against dense attention with an explicit loop over the pairs that share a window."""

import pytest
import torch

from layers import randomise, tokens
from polaformer.attention import WindowAttention, create, create_layer
from polaformer.ops.windows import partition


def dense(layer, x, grid, mask=None):
    """The same from the N×N map: tokens attend to each other if they share a window, with windows starting at −shift."""
    height, width = grid
    place = [(row, column) for row in range(height) for column in range(width)]
    window, table = layer.window, layer.relative_positions.table
    shift = [layer.shift if length > window else 0 for length in grid]
    cell = [tuple((p + (window - s) * bool(s)) // window for p, s in zip(one, shift, strict=True)) for one in place]
    q, k, v = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT * (x.shape[-1] // layer.num_heads) ** -0.5
    bias = torch.full((layer.num_heads, len(place), len(place)), float("-inf"), dtype=x.dtype)
    for i, one in enumerate(place):
        for j, other in enumerate(place):
            if cell[i] == cell[j]:
                row = (one[0] - other[0] + window - 1) * (2 * window - 1) + one[1] - other[1] + window - 1
                bias[:, i, j] = table[row]
    scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    weights = scores.softmax(dim=-1).nan_to_num()
    return layer.proj((weights @ v).transpose(1, 2).flatten(2))


def layer_of(window, shift, dim=8, num_heads=2):
    return randomise(WindowAttention(dim, num_heads, window, shift=shift)).double()


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("grid", [(3, 3), (6, 6), (7, 5), (2, 8), (1, 1), (4, 3)], ids=str)
def test_equals_dense_attention_at_any_size(grid, shift):
    layer, x = layer_of(3, shift), tokens(grid[0] * grid[1], 8).requires_grad_()
    out, expected = layer(x, grid), dense(layer, x, grid)
    assert torch.allclose(out, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(out)
    parameters = [x, *layer.parameters()]
    given = torch.autograd.grad((out * weights).sum(), parameters)
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    for one, other in zip(given, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("grid", [(6, 6), (7, 5), (2, 8)], ids=str)
def test_masked_tokens_are_no_keys(grid, shift):
    layer, x = layer_of(3, shift), tokens(grid[0] * grid[1], 8)
    mask = torch.rand(2, grid[0] * grid[1]) > 0.3
    mask[:, 0] = True
    out = layer(x, grid, mask)
    seen = mask[..., None].expand_as(out)
    assert torch.allclose(out[seen], dense(layer, x, grid, mask)[seen], rtol=1e-10, atol=1e-10)
    noise = torch.where(mask[..., None], x, torch.nan).requires_grad_()
    assert torch.equal(layer(noise, grid, mask), out)
    (layer(noise, grid, mask) * seen).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    assert not noise.grad[~mask].any()


def test_maps_are_those_of_the_windows_and_forward_applies_them():
    layer, x, grid = layer_of(3, 1), tokens(30, 8), (6, 5)
    maps = layer.maps(x, grid)["softmax"]
    assert maps.shape == (2 * 4, 2, 9, 9)
    assert torch.allclose(maps.sum(dim=-1), torch.ones(8, 2, 9, dtype=torch.float64))
    values = layer.qkv(x)[..., 16:].unflatten(1, grid)
    padded = torch.nn.functional.pad(values, (0, 0, 0, 1)).roll((-1, -1), dims=(1, 2))
    windows = partition(padded, 3).unflatten(-1, (2, 4)).transpose(1, 2)
    out = layer.proj((maps @ windows).transpose(1, 2).flatten(2))
    image = torch.zeros(2, 6, 6, 8, dtype=torch.float64)
    for index, window in enumerate(out.unflatten(1, (3, 3))):
        b, row, column = index // 4, index % 4 // 2, index % 2
        image[b, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3] = window
    assert torch.allclose(image.roll((1, 1), dims=(1, 2))[:, :, :5].flatten(1, 2), layer(x, grid), atol=1e-12)


def test_half_precision_and_autocast():
    layer, x = layer_of(3, 1).float(), tokens(36, 8).float()
    expected = layer(x, (6, 6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(layer(x, (6, 6)).float(), expected, atol=0.05)
    assert torch.allclose(layer.bfloat16()(x.bfloat16(), (6, 6)).float(), expected, atol=0.05)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("give grid=", lambda layer, x: layer(x)),
        ("a context or a bias is not supported in windows", lambda layer, x: layer(x, (3, 3), context=x)),
        ("a context or a bias is not supported in windows", lambda layer, x: layer(x, (3, 3), bias=torch.zeros(9, 9))),
        ("x has 9 tokens but grid", lambda layer, x: layer(x, (4, 3))),
        ("mask has shape", lambda layer, x: layer(x, (3, 3), torch.ones(2, 8, dtype=torch.bool))),
    ],
)
def test_wrong_calls_are_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call(layer_of(3, 1), tokens(9, 8))


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="shift is 3 but windows are 3 wide"):
        WindowAttention(8, 2, 3, shift=3)
    with pytest.raises(ValueError, match="window is 0"):
        WindowAttention(8, 2, 0)


def test_samples_of_unequal_size_are_shifted_as_they_would_be_alone():
    layer, grid, sizes = layer_of(3, 1), (6, 7), [(6, 7), (3, 7), (6, 2), (2, 3)]
    x, mask = tokens(42, 8, batch=4), torch.zeros(4, 6, 7, dtype=torch.bool)
    for index, (height, width) in enumerate(sizes):
        mask[index, :height, :width] = True
    out = layer(x, grid, mask.flatten(1), sizes=sizes).unflatten(1, grid)
    maps = layer.maps(x, grid, mask.flatten(1), sizes=sizes)["softmax"]
    assert maps.shape == (4 * 6, 2, 9, 9)
    for index, (height, width) in enumerate(sizes):
        own = x[index].unflatten(0, grid)[:height, :width].flatten(0, 1)[None]
        alone = layer(own, (height, width))[0].unflatten(0, (height, width))
        assert torch.allclose(out[index, :height, :width], alone, rtol=1e-10, atol=1e-10)
    whole = layer.maps(x[:1], grid)["softmax"]
    assert torch.allclose(maps[:6][:, :, 4], whole[:, :, 4], atol=1e-12)


def test_a_core_that_windows_cannot_use_is_refused_at_once():
    with pytest.raises(ValueError, match="PolaCore supports no bias, which relative positions need; use softmax"):
        WindowAttention(8, 2, 3, core=create("pola", num_heads=2, head_dim=4))
    softmax = create("softmax", num_heads=2, head_dim=4)
    for options in ({"scale": 0.1}, {"dropout": 0.1}):
        with pytest.raises(TypeError, match="give them to the core"):
            WindowAttention(8, 2, 3, core=softmax, **options)


def test_one_factory_creates_windows_too():
    layer = create_layer("softmax", 8, 2, window=3, shift=1, scale=0.1, gate="linear")
    assert isinstance(layer, WindowAttention)
    assert (layer.window, layer.shift, layer.core.scale) == (3, 1, 0.1)
    with pytest.raises(TypeError, match=r"'softmax' does not take tokens_?; its options are: .*shift"):
        create_layer("softmax", 8, 2, window=3, tokens_=4)
    with pytest.raises(TypeError, match="windows support neither tokens nor num_prefix_tokens"):
        create_layer("softmax", 8, 2, window=3, tokens=4)
