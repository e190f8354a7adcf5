"""One test suite for all mechanisms: registering a mechanism is enough to have it tested."""

import inspect
import math
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from oracle import relative_error
from polaformer import attention
from polaformer.attention.core import Facts
from polaformer.attention.mechanisms.pola import POLARITIES

HEADS, WIDTH, BATCH = 2, 4, 2
# Small enough that the lengths below span several blocks, chunks, segments or draws, and are not multiples of them.
SMALL = {
    "bigbird": {"block": 3, "num_random": 1},
    "informer": {"factor": 1},
    "linformer": {"max_length": 64, "rank": 5},
    "local": {"block": 4},
    "longformer": {"window": 6},
    "nystrom": {"num_landmarks": 4},
    "performer": {"num_features": 12},
    "reformer": {"chunk": 4},
    "skyformer": {"num_landmarks": 6},
    "synthesizer": {"max_length": 64},
}
PUBLISHED = [f"{name} as published" for name in attention.names() if "as_published" in attention.option_names(name)]
NAMES = attention.names()
COMPILED = ("pola", "softmax", "focused", "bigbird")  # one of each kind in the default suite
CROSS = [name for name in NAMES if attention.facts(name).cross]
# The results of these do not depend on the order of tokens; those of the others do, or on random draws by position.
WITHOUT_ORDER = {
    "angular",
    "efficient",
    "enhanced",
    "focused",
    "hedgehog",
    "hydra",
    "kernelized",
    "linear",
    "mobile",
    "performer",
    "pola",
    "softmax",
}
LENGTH = 29
# Published landmarks are means of equally many tokens.
LENGTHS = {"nystrom as published": 28}


def create(label, dtype=torch.float64, **options):
    """A core with non-zero parameters, so that none hides a fault; `label` is a name, or a name and "as published"."""
    name, _, published = label.partition(" ")
    options = SMALL.get(name, {}) | ({"as_published": True} if published else {}) | options
    core = attention.create(name, num_heads=HEADS, head_dim=WIDTH, **options)
    for parameter in core.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return core.to(dtype).eval()


def qkv(queries=LENGTH, keys=None, dtype=torch.float64, batch=BATCH):
    keys = queries if keys is None else keys
    return [torch.randn(batch, HEADS, n, WIDTH, dtype=dtype) for n in (queries, keys, keys)]


def padded(length=LENGTH, batch=BATCH):
    """A mask with padding at the end, of a different length per sample, and a hole."""
    mask = torch.arange(length) < length - 2 - 3 * torch.arange(batch)[:, None]
    mask[:, 5] = False
    return mask


def call(core, *args, seed=3, **options):
    """A call with a fixed seed, so that random mechanisms draw the same numbers each time."""
    torch.manual_seed(seed)
    return core(*args, **options)


def test_every_mechanism_of_the_paper_is_there():
    of_vision = {"softmax", "efficient", "hydra", "enhanced", "angular", "focused", "mobile", "pola"}
    of_sequences = {"local", "linear", "reformer", "performer", "synthesizer", "longformer", "informer", "bigbird"}
    of_sequences |= {"linformer", "kernelized", "cosformer", "nystrom", "skyformer", "hedgehog"}
    assert sorted(of_vision | of_sequences) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_says_what_the_mechanism_is(name):
    """Formula and shapes, normaliser, complexity, parameters; and for rivals the paper and the source that is followed."""
    module = __import__(f"polaformer.attention.mechanisms.{name}", fromlist=["x"])
    text = module.__doc__
    words = ["Shapes:", "Normaliser:", "Cost O(", "arameters", "Paper:", "Source:", "# B batch"]
    assert [word for word in words if word not in text] == []
    # These follow their published code; all others depart from it somewhere.
    follows = {"efficient", "focused", "pola", "cosformer", "synthesizer"}
    assert ("Departs:" in text) == (name not in follows)


def test_the_guide_lists_every_mechanism_as_its_facts_have_it():
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text()
    section = guide.split("## Mechanisms")[1].split("## ")[0]
    found = re.findall(r"^(\| `(\w+)`([ ¹²³⁴]*)\|[^|]*\|([^|]*)\|([^|]*)\|[^|]*\|)$", section, flags=re.M)
    rows = {row[1]: row for row in found}
    assert sorted(rows) == NAMES
    costs = {"N": "linear", "N log N": "n log n", "N²": "quadratic"}
    for name, (_, _, marks, cost, options) in rows.items():
        facts = attention.facts(name)
        assert costs[cost.strip()] == facts.cost, name
        assert ("¹" in marks, "²" in marks, "⁴" in marks) == (
            not facts.cross,
            facts.approximates == "softmax",
            facts.stochastic,
        ), name
        # Linear-angular attention itself ignores the order of tokens, but the convolution of its published layer does not.
        assert ("³" in marks) == (name not in WITHOUT_ORDER or name == "angular"), name
        assert re.findall(r"`(\w+)`", options) == attention.option_names(name), name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in NAMES), *(("pola", {"polarity": polarity}) for polarity in POLARITIES)],
    ids=str,
)
def test_facts_state_the_number_of_maps_and_whether_rows_are_distributions(name, options, masked):
    """Rows of queries with little or no key mass sum to less than 1, so only the largest sum must reach 1."""
    core, (q, k, _) = create(name, **options), qkv()
    maps = core.weights(q, k, mask=padded() if masked else None)
    assert len(maps) == (WIDTH if core.facts.num_maps is None else core.facts.num_maps)
    entries = torch.stack(list(maps.values()))
    sums = entries.sum(dim=-1)
    are_distributions = bool((entries >= 0).all() and (sums <= 1 + 1e-6).all() and sums.max() >= 1 - 1e-3)
    assert are_distributions == core.facts.distributions


@pytest.mark.parametrize("name", NAMES)
def test_facts_are_hashable_and_belong_to_the_class(name):
    facts = attention.facts(name)
    assert len({facts, replace(facts)}) == 1
    with pytest.raises(FrozenInstanceError):
        facts.cost = "free"
    core = create(name)
    own = {"max_length": core.facts.max_length, "max_keys": core.facts.max_keys}
    assert core.facts == replace(facts, **own)
    if not facts.needs_length and own["max_length"] is None:
        assert core.facts is type(core).facts  # so that a subclass may declare others


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_max_length_is_a_fact(name):
    """Required where it sizes parameters, optional where the result is scaled by it; models read the facts alone."""
    facts = attention.facts(name)
    assert ("max_length" in attention.option_names(name)) == (facts.needs_length or facts.scaled_by_length)


def test_facts_are_given_by_name():
    """A fact that is added later must not change the meaning of those given before."""
    with pytest.raises(TypeError):
        Facts("linear", "softmax")


def test_the_defaults_of_pola_attention_are_the_parts_it_is_published_with():
    parameters, parts = inspect.signature(attention.PolaAttention).parameters, attention.facts("pola").published
    defaults = {name: parameters[name].default for name in ("gate", "conv", "kernel_size")}
    assert defaults == {"gate": parts.gate, "conv": parts.conv, "kernel_size": parts.kernel_size}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_the_output_has_the_shape_of_q_and_the_dtype_of_v(name, dtype):
    q, k, v = qkv(dtype=dtype)
    out = create(name, torch.float64 if dtype == torch.float64 else torch.float32)(q, k, v)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert out.isfinite().all()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13, 24, 40])
@pytest.mark.parametrize("name", NAMES)
def test_any_length_will_do(name, length):
    core, (q, k, v) = create(name), qkv(length)
    assert call(core, q, k, v).isfinite().all()
    mask = torch.arange(length).expand(BATCH, -1) < torch.tensor([[1], [length]])
    assert call(core, q, k, v, mask=mask).isfinite().all()


@pytest.mark.parametrize("queries", [1, 7, LENGTH, 40])
@pytest.mark.parametrize("name", CROSS)
def test_queries_may_be_others_than_keys(name, queries):
    """Even in the same number: the mask of the keys is then not that of the queries."""
    core, (q, k, v) = create(name), qkv(queries, LENGTH)
    out = call(core, q, k, v, mask=padded(), cross=True)
    torch.manual_seed(3)
    maps = core.weights(q, k, mask=padded(), cross=True)
    torch.testing.assert_close(out, core.apply_maps(maps, v * padded()[:, None, :, None]), rtol=1e-9, atol=1e-9)
    if queries != LENGTH:
        assert torch.equal(call(core, q, k, v, mask=padded()), out)


@pytest.mark.parametrize("queries", [7, LENGTH, 40])
@pytest.mark.parametrize("name", [name for name in CROSS if name != "informer"])  # whose draws depend on M, masked or not
def test_law_keys_in_padding_are_absent_for_other_queries(name, queries):
    core, (q, k, v) = create(name, **({"max_length": 64} if name == "cosformer" else {})), qkv(queries, LENGTH)
    for existing in (3, 20):
        mask = (torch.arange(LENGTH) < existing).expand(BATCH, -1)
        found = call(core, q, k, v, mask=mask, cross=True)
        wanted = call(core, q, k[:, :, :existing], v[:, :, :existing], cross=True)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CROSS])
def test_what_relates_the_tokens_of_one_sequence_says_so(name):
    with pytest.raises(ValueError, match="got 7 queries and 29 keys, but both must be the same tokens in this mechanism; give"):
        create(name)(*qkv(7, LENGTH))
    for function, inputs in ((create(name), qkv()), (create(name).weights, qkv()[:2])):
        with pytest.raises(
            ValueError, match=f"'{name}': got cross=True, or its layer a context, but queries and keys of this mechanism must"
        ):
            function(*inputs, cross=True)
    with pytest.raises(
        ValueError, match=f"reduction is 2, but queries and keys of '{name}' must be the same tokens; give reduction=1"
    ):
        attention.create_layer(name, 8, 2, tokens=(4, 4), reduction=2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("label", [*NAMES, *PUBLISHED])
def test_explicit_maps_are_what_forward_applies(label, masked):
    length = LENGTHS.get(label, LENGTH)
    core, (q, k, v), mask = create(label), qkv(length), padded(length) if masked else None
    out = call(core, q, k, v, mask=mask)
    torch.manual_seed(3)
    maps = core.weights(q, k, mask=mask)
    assert all(one.shape == (BATCH, HEADS, length, length) for one in maps.values())
    values = v if mask is None or core.facts.reads_masked else v.masked_fill(~mask[:, None, :, None], 0.0)
    torch.testing.assert_close(out, core.apply_maps(maps, values), rtol=1e-9, atol=1e-9)
    if mask is not None and "published" not in label:
        assert all((one * ~mask[:, None, None, :] == 0).all() for one in maps.values())


@pytest.mark.parametrize("name", NAMES)
def test_law_content_under_the_mask_changes_nothing(name):
    """Masked positions have no effect on outputs, maps or gradients, even if they hold NaN or infinity."""
    core, mask = create(name), padded()
    hidden, found = ~mask[:, None, :, None], []
    q, k, v = qkv()
    for content in (0.0, 1e3, float("nan"), float("inf")):
        # Keys and values; queries too if the mechanism mixes them, as masked tokens are then not queries.
        seen = q.masked_fill(hidden, content) if attention.facts(name).mixes_queries else q.clone()
        leaves = [x.requires_grad_() for x in (seen, k.masked_fill(hidden, content), v.masked_fill(hidden, content))]
        out = call(core, *leaves, mask=mask).masked_fill(hidden, 0.0)
        gradients = torch.autograd.grad(out.square().sum(), leaves, materialize_grads=True)
        torch.manual_seed(3)
        maps = [one.masked_fill(hidden, 0.0) for one in core.weights(*leaves[:2], mask=mask).values()]
        found.append([out, *(g.masked_fill(hidden, 0.0) for g in gradients), *maps])
    for others in found[1:]:
        for first, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(WITHOUT_ORDER))
def test_law_a_masked_key_is_an_absent_key(name):
    core, (q, k, v), kept = create(name), qkv(), padded()[0]
    masked = core(q, k, v, mask=kept.expand(BATCH, -1))[:, :, kept]
    alone = core(q[:, :, kept], k[:, :, kept], v[:, :, kept])
    torch.testing.assert_close(masked, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_without_keys_gives_zeros_and_finite_gradients(name):
    core, leaves = create(name, torch.float32), [x.requires_grad_() for x in qkv(dtype=torch.float32)]
    mask = torch.tensor([[False] * LENGTH, [True] * LENGTH])
    out = call(core, *leaves, mask=mask)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()
    gradients = torch.autograd.grad(out.sum(), leaves, materialize_grads=True)
    assert all(g.isfinite().all() for g in gradients)
    assert all((one[0] == 0).all() for one in core.weights(*leaves[:2], mask=mask).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_zero_vectors_a_single_key_and_large_ones_give_no_nan(name, dtype):
    core = create(name, torch.float32)
    only = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    only[:, 7] = True
    q, k, v = qkv(dtype=dtype)
    zeros = torch.zeros_like(q)
    for given, mask in (((zeros, zeros, zeros), None), ((zeros, k, v), None), ((q, zeros, v), None), ((q, k, v), only)):
        check_finite(core, given, mask)
    # These exceed float16: scores or gradients of PyTorch's fused softmax on a CPU, and mobile attention's unbounded outputs.
    if dtype != torch.float16 or name not in ("bigbird", "mobile", "softmax"):
        check_finite(core, (q.sign() * 1e4, k.sign() * 1e4, v), None)


def check_finite(core, given, mask):
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = call(core, *leaves, mask=mask)
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out.float().sum(), leaves, materialize_grads=True)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("name", NAMES)
def test_law_samples_do_not_depend_on_each_other(name):
    core, (q, k, v), mask = create(name), qkv(batch=3), padded(batch=3)
    together = call(core, q, k, v, mask=mask)
    q[1:], k[1:], v[1:] = 30 * q[1:], 30 * k[1:], 30 * v[1:]
    torch.testing.assert_close(call(core, q, k, v, mask=mask)[0], together[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_law_tokens_in_another_order(name):
    """Permuted tokens give permuted outputs if, and only if, the mechanism ignores the order of tokens."""
    core, (q, k, v), order = create(name), qkv(), torch.randperm(LENGTH)
    same = torch.allclose(
        call(core, q[:, :, order], k[:, :, order], v[:, :, order]), call(core, q, k, v)[:, :, order], rtol=1e-9, atol=1e-9
    )
    assert same == (name in WITHOUT_ORDER)


@pytest.mark.parametrize("name", [name for name in CROSS if name in WITHOUT_ORDER])
def test_law_keys_in_another_order_change_nothing(name):
    core, (q, k, v), order = create(name), qkv(7, LENGTH), torch.randperm(LENGTH)
    torch.testing.assert_close(core(q, k[:, :, order], v[:, :, order]), core(q, k, v), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_derivatives(name, masked):
    """Of q, k, v and every parameter, in float64, against finite differences."""
    length = 9
    core, inputs = create(name), [x.requires_grad_() for x in qkv(length, batch=1)]
    mask = (torch.arange(length) != 4)[None] if masked else None
    parameters = {key: parameter.detach().requires_grad_() for key, parameter in core.named_parameters()}

    def function(q, k, v, *values):
        torch.manual_seed(3)
        return functional_call(core, dict(zip(parameters, values, strict=True)), (q, k, v), {"mask": mask})

    assert torch.autograd.gradcheck(function, (*inputs, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_every_draw_and_only_random_mechanisms_draw(name):
    core, inputs = create(name), qkv()
    first, again = call(core, *inputs, seed=1), call(core, *inputs, seed=1)
    assert torch.equal(first, again)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    others = [call(core, *inputs, seed=seed) for seed in range(2, 8)]
    assert any(not torch.equal(first, other) for other in others) == attention.facts(name).stochastic
    torch.manual_seed(1)
    core(*inputs)
    assert torch.equal(torch.get_rng_state(), state) != attention.facts(name).stochastic


@pytest.mark.parametrize("label", [*NAMES, *PUBLISHED])
def test_a_state_dict_holds_everything_that_was_drawn_or_learned(label):
    core, inputs = create(label), qkv(LENGTHS.get(label, LENGTH))
    other = create(label)
    other.load_state_dict(core.state_dict(), strict=True)
    assert torch.equal(call(other, *inputs), call(core, *inputs))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in COMPILED else pytest.mark.long) for n in NAMES])
def test_it_compiles(name):
    """As one graph. `aot_eager` traces forward and backward as the other backends do, without generating kernels."""
    torch.compiler.reset()
    core, mask = create(name, torch.float32), padded()
    leaves = [x.requires_grad_() for x in qkv(dtype=torch.float32)]
    whole = name != "bigbird"  # which draws its pattern in Python, outside the graph
    compiled = torch.compile(core, backend="aot_eager", fullgraph=whole)
    out, wanted = call(compiled, *leaves, mask=mask), call(core, *leaves, mask=mask)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    found, right = (torch.autograd.grad(x.square().sum(), leaves, materialize_grads=True) for x in (out, wanted))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Multiplications(TorchDispatchMode):
    """Counts the multiplications of matmuls, and one for each element that any other operation writes."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        tensors = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() // x.element_size() for x in tensors)])
        if packet in flop_registry:
            self.count += flop_registry[packet](*args, **(kwargs or {}), out_val=out) // 2
        elif not func.is_view:
            self.count += sum(x.numel() for x in tensors)
        return out


def multiplications(name, length):
    options = SMALL.get(name, {}) | ({"max_length": length} if attention.facts(name).needs_length else {})
    core = attention.create(name, num_heads=1, head_dim=WIDTH, **options)
    q, k, v = (torch.randn(1, 1, length, WIDTH) for _ in range(3))
    if name == "pola":
        core.backend = "torch"  # its operations are visible to the counter
    torch.manual_seed(0)
    with torch.no_grad(), Multiplications() as counted:
        core(q, k, v, mask=torch.ones(1, length, dtype=torch.bool))
    return counted


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_is_of_the_class_that_it_says(name):
    """How multiplications, and the largest tensor, grow from N to 2N tokens."""
    cost, length = attention.facts(name).cost, 2048
    short, long = multiplications(name, length), multiplications(name, 2 * length)
    growth, memory = math.log2(long.count / short.count), math.log2(long.largest / short.largest)
    if cost == "quadratic":
        assert 1.8 <= growth <= 2.05
    else:
        assert 0.9 <= growth <= (1.05 if cost == "linear" else 1.25)
        # A per-token table belongs to the mechanism; the tensors that a call creates must not grow quadratically.
        assert memory <= (1.05 if cost == "linear" else 1.25)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_input_is_refused_before_any_work(name):
    core, (q, k, v), mask = create(name), qkv(), padded()
    wrong = [
        (TypeError, "q is a list; give a torch.Tensor", ([1.0], k, v), None),
        (TypeError, "q has dtype torch.int64; give a floating-point tensor", (q.long(), k.long(), v.long()), None),
        (TypeError, "dtype torch.float32", (q, k.float(), v.float()), None),
        (ValueError, "give 4 axes", (q[0], k[0], v[0]), None),
        (ValueError, "q has 4 heads of width 4|k has shape", (q.repeat(1, 2, 1, 1), k.repeat(1, 2, 1, 1), v), None),
        (ValueError, "width 8", (q.repeat(1, 1, 1, 2), k.repeat(1, 1, 1, 2), v.repeat(1, 1, 1, 2)), None),
        (ValueError, "k has shape .* batch, heads and head width must agree", (q, k[:1], v[:1]), None),
        (ValueError, "k has shape .* batch, heads and head width must agree", (q, k[:, :1], v[:, :1]), None),
        (ValueError, "v has shape .* but k has shape", (q, k, v[:, :, :-1]), None),
        (TypeError, "mask", (q, k, v), mask.double()),
        (ValueError, "mask has shape", (q, k, v), mask[:, :1]),
        (ValueError, "mask has shape", (q, k, v), mask[:1]),
        (ValueError, "mask has shape", (q, k, v), torch.ones(BATCH, LENGTH + 1, dtype=torch.bool)),
    ]
    for error, message, inputs, given in wrong:
        with pytest.raises(error, match=message):
            core(*inputs, mask=given)
    with pytest.raises(ValueError, match="mask has shape"):
        core.weights(q, k, mask=mask[:, :1])


NOTHING = [
    (name, *sizes)
    for name in NAMES
    for sizes in [(0, 0, 2), (3, 3, 0), (5, 0, 2), (0, 5, 2)]
    if sizes[0] == sizes[1] or name in CROSS
]


@pytest.mark.parametrize(("name", "queries", "keys", "batch"), NOTHING)
def test_nothing_in_gives_nothing_or_zeros_out(name, queries, keys, batch):
    core, leaves = create(name), [x.requires_grad_() for x in qkv(queries, keys, batch=batch)]
    for mask in (None, torch.ones(batch, keys, dtype=torch.bool)):
        out = core(*leaves, mask=mask)
        assert out.shape == leaves[0].shape
        assert (out == 0).all()
        gradients = torch.autograd.grad(out.sum(), leaves, materialize_grads=True, allow_unused=True)
        assert all((g == 0).all() for g in gradients)
        maps = core.weights(*leaves[:2], mask=mask)
        assert all(one.shape == (batch, HEADS, queries, keys) for one in maps.values())
        assert torch.equal(core.apply_maps(maps, leaves[2]), out)


@pytest.mark.parametrize("name", NAMES)
def test_maps_can_be_applied_in_half_precision(name):
    core, (q, k, v) = create(name, torch.float32), qkv(dtype=torch.bfloat16)
    torch.manual_seed(3)
    found = core.apply_maps(core.weights(q, k), v)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, call(core, q, k, v)) <= 2e-2


@pytest.mark.parametrize("name", ["enhanced", "focused", "hydra", "angular", "mobile", "efficient", "kernelized"])
def test_tiny_and_distant_vectors_keep_their_digits(name):
    q, k, v = qkv(dtype=torch.float32)
    core, exact = create(name, torch.float32), create(name)
    exact.load_state_dict({key: x.double() for key, x in core.state_dict().items()})
    tiny = (1e-20 * q, 1e-20 * k, v)
    assert relative_error(core(*tiny), exact(*(x.double() for x in tiny))) <= 1e-5
    if name == "kernelized":  # whose distances do not depend on the origin
        far = (q + 300, k + 300, v)
        assert relative_error(core(*far), exact(*(x.double() for x in far))) <= 1e-4


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("polarity", ["both", "same", "positive"])
def test_every_value_of_the_scale_gives_finite_outputs_and_gradients(polarity, dtype):
    core, inputs = attention.create("pola", num_heads=HEADS, head_dim=WIDTH, polarity=polarity).to(dtype), qkv(dtype=dtype)
    most = torch.finfo(dtype).max
    for value in (-most, -1e4, -120.0, -88.0, -40.0, -1.0, 0.0, 1.0, 40.0, 120.0, 1e4, most):
        torch.nn.init.constant_(core.scale, value)
        leaves = [*(x.detach().requires_grad_() for x in inputs), *core.parameters()]
        out = core(*leaves[:3])
        found = [out, *torch.autograd.grad(out.float().square().sum(), leaves)]
        assert all(x.isfinite().all() for x in found), value


def test_a_scale_near_zero_gives_no_nan():
    core, inputs = create("focused", torch.float32), qkv(dtype=torch.float32)
    torch.nn.init.constant_(core.scale, -120.0)
    check_finite(core, inputs, None)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("softmax", {"scale": "x"}, "scale is 'x'; give a finite number"),
        ("softmax", {"scale": float("nan")}, "scale is nan; give a finite number"),
        ("softmax", {"dropout": 1.0}, "dropout is 1.0; give a number ≥ 0 and < 1"),
        ("kernelized", {"dropout": "x"}, "dropout is 'x'; give a number ≥ 0 and < 1"),
        ("focused", {"focusing_factor": "3"}, "focusing_factor is '3'; give a number > 0"),
        ("focused", {"eps": -1.0}, "eps is -1.0; give a number ≥ 0"),
        ("skyformer", {"gamma": True}, "gamma is True; give a number > 0"),
        ("performer", {"as_published": "no"}, "as_published is 'no'; give True or False"),
        ("local", {"as_published": 1}, "as_published is 1; give True or False"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        attention.create(name, num_heads=2, head_dim=4, **options)


def test_softmax_drops_weights_in_training_only():
    q, k, v = qkv()
    core = attention.create("softmax", num_heads=HEADS, head_dim=WIDTH, dropout=0.5)
    assert not torch.allclose(call(core, q, k, v, seed=1), call(core, q, k, v, seed=2))
    assert torch.equal(core.eval()(q, k, v), create("softmax")(q, k, v))


def test_names_and_sizes_that_make_no_sense_are_refused():
    for name in (None, ["hydra"], "hidra"):
        for function in (attention.facts, attention.option_names):
            with pytest.raises(ValueError, match="attention: unknown mechanism"):
                function(name)
    with pytest.raises(ValueError, match="num_heads is 0; give an integer ≥ 1"):
        attention.create_layer("hydra", 8, 0)
    with pytest.raises(ValueError, match="key_positions is 'ab'"):
        attention.create_layer("focused", 8, 2, tokens="ab")
    with pytest.raises(ValueError, match=r"kernel_size is \(9, 3\), but conv 'sequence' has one dimension"):
        attention.create_layer("angular", 8, 2, kernel_size=(9, 3))
    assert attention.create_layer("angular", 8, 2, kernel_size=(1, 7)).conv.kernel_size == (7, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("softmax",)])
def test_an_additive_bias_is_refused_by_all_but_softmax(name):
    with pytest.raises(ValueError, match=f"attention '{name}': got an additive bias of shape .* use 'softmax'"):
        create(name)(*qkv(), bias=torch.zeros(LENGTH, LENGTH))


@pytest.mark.parametrize("name", NAMES)
def test_impossible_heads_are_refused(name):
    for heads in ({"num_heads": 0, "head_dim": 4}, {"num_heads": 2, "head_dim": -4}, {"num_heads": 2, "head_dim": 2.0}):
        with pytest.raises(ValueError, match="give an integer ≥ 1"):
            attention.create(name, **heads, **SMALL.get(name, {}))


@pytest.mark.parametrize("name", [name for name in NAMES if attention.facts(name).needs_length])
def test_what_has_parameters_for_each_token_wants_to_know_how_many(name):
    with pytest.raises(TypeError, match=f"{name!r} has parameters per token; give max_length"):
        attention.create(name, num_heads=2, head_dim=4)
    core = attention.create(name, num_heads=HEADS, head_dim=WIDTH, max_length=8).double()
    with pytest.raises(ValueError, match=r"got 9 (tokens|queries), but it was created for at most 8.*max_length=9"):
        core(*qkv(9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in NAMES if not attention.facts(name).stochastic])
def test_half_precision_stays_close_to_float64(name, dtype):
    core, (q, k, v) = create(name).float(), qkv(60, dtype=dtype)
    wanted = core.double()(q.double(), k.double(), v.double())
    assert relative_error(core.float()(q, k, v), wanted) <= {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_autocast_does_not_reach_inside(name):
    core, (q, k, v) = create(name, torch.float32), qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call(core, q, k, v)
    tolerance = 1e-2 if name == "softmax" else 1e-6  # PyTorch's fused softmax attention follows autocast
    assert relative_error(found, call(core, q, k, v)) <= tolerance


@pytest.mark.parametrize("name", NAMES)
def test_the_layer_around_it_is_what_was_published(name):
    layer = attention.create_layer(name, 8, 2, tokens=(4, 5), num_prefix_tokens=1)
    kinds = {"pola": ("Conv2d", "LinearGate", "TokenTable"), "focused": ("Conv2d", None, "TokenTable")}
    kinds["angular"] = ("SequenceConvolution", None, None)
    parts = [None if part is None else type(part).__name__ for part in (layer.conv, layer.gate, layer.key_positions)]
    assert tuple(parts) == kinds.get(name, (None, None, None))
    x = torch.randn(2, 21, 8)
    assert layer(x, grid=(4, 5)).shape == x.shape


def test_the_layer_takes_arguments_of_both_and_refuses_others():
    layer = attention.create_layer("nystrom", 8, 2, num_landmarks=3, gate="linear", conv="depthwise", kernel_size=3)
    assert (layer.core.num_landmarks, layer.conv.kernel_size) == (3, (3, 3))
    with pytest.raises(
        TypeError, match="'nystrom' does not take landmarks; its options are: num_landmarks, iterations, as_pub"
    ):
        attention.create_layer("nystrom", 8, 2, landmarks=3)
    assert attention.create_layer("synthesizer", 8, 2, tokens=30).core.max_length == 30
