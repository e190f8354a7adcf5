"""What other people's libraries compute, with their own projections, weights and random numbers, as tensors to compare with.

Each maker gives q, k, v, what else our core needs, and "wanted". `python tests/libraries.py` writes the files that
tests/attention/test_libraries.py reads; `make test-oracles` makes them again and compares.

# B batch, H heads, N queries, M keys, D head width
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "attention" / "oracles"
HEADS, WIDTH = 2, 6
Tensors = dict[str, Tensor]


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    """(B, N, H·D) to (B, H, N, D)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(B, H, N, D) to (B, N, H·D)."""
    return x.transpose(1, 2).flatten(2)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def nystrom_library(masked: bool) -> Tensors:
    """One sample of one head, since its inverse starts from the largest sums of all; no convolution, eps 0.

    Its segments are of positions, ours of tokens that exist: the mask leaves as many in each, and the length divides.
    """
    library = importlib.import_module("nystrom_attention")
    theirs = library.NystromAttention(8, dim_head=WIDTH, heads=1, num_landmarks=6, residual=False, eps=0.0).double()
    x = normal(1, 24, 8)
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1] * 3)[None] == 1 if masked else torch.ones(1, 24, dtype=torch.bool)
    q, k, v = (part[:, None] for part in theirs.to_qkv(x).chunk(3, dim=-1))
    projection = theirs.to_out[0] if isinstance(theirs.to_out, torch.nn.Sequential) else theirs.to_out
    outward = {"out.weight": projection.weight, "out.bias": projection.bias}
    return {"q": q, "k": k, "v": v, "mask": mask, **outward, "wanted": theirs(x, mask=mask if masked else None)}


def nystrom_transformers(start: str, batch: int, heads: int) -> Tensors:
    """Its start "exact" is ours; the published one, "original", is the same for one matrix only. No mask, no convolution."""
    module = importlib.import_module("transformers.models.nystromformer.modeling_nystromformer")
    config = importlib.import_module("transformers").NystromformerConfig(
        hidden_size=heads * WIDTH,
        num_attention_heads=heads,
        num_landmarks=6,
        segment_means_seq_len=24,
        attention_probs_dropout_prob=0.0,
    )
    theirs = module.NystromformerSelfAttention(config).double()
    theirs.init_option, theirs.conv_kernel_size = start, None  # its configuration takes neither
    x = normal(batch, 24, heads * WIDTH)
    q, k, v = (split(f(x), heads) for f in (theirs.query, theirs.key, theirs.value))
    return {"q": q, "k": k, "v": v, "wanted": theirs(x)[0]}


def local_library(masked: bool) -> Tensors:
    """Its window without a look at the neighbours is our block; it pads by itself, scales by D^-1/2, needs its rotary positions
    switched off, and takes the mask as we do. Each block keeps a token."""
    theirs = importlib.import_module("local_attention").LocalAttention(
        dim=WIDTH, window_size=4, causal=False, look_backward=0, look_forward=0, autopad=True, use_rotary_pos_emb=False
    )
    q, k, v = (torch.randn(2, HEADS, 11, WIDTH) for _ in range(3))
    mask = torch.rand(2, 11) < 0.67 if masked else torch.ones(2, 11, dtype=torch.bool)
    mask[:, ::4] = True
    wanted = theirs(*(x.flatten(0, 1) for x in (q, k, v)), mask=mask.repeat_interleave(HEADS, 0)).view_as(v)
    return {"q": q, "k": k, "v": v, "mask": mask, "wanted": joined(wanted)}


def longformer_transformers() -> Tensors:
    """Its window of 8 is symmetric, our pair (4, 4); its mask is additive; it needs a length that is a multiple of 8."""
    module = importlib.import_module("transformers.models.longformer.modeling_longformer")
    configuration = importlib.import_module("transformers").LongformerConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_window=[8], attention_probs_dropout_prob=0.0
    )
    theirs = module.LongformerSelfAttention(configuration, layer_id=0).double().eval()
    x, mask = normal(2, 24, HEADS * WIDTH), torch.ones(2, 24, dtype=torch.bool)
    mask[1, 17:] = False
    wanted = theirs(
        x,
        attention_mask=torch.where(mask, 0.0, -10000.0).double(),
        is_index_masked=~mask,
        is_index_global_attn=torch.zeros_like(mask),
        is_global_attn=False,
    )[0]
    q, k, v = (split(f(x)) for f in (theirs.query, theirs.key, theirs.value))
    return {"q": q, "k": k, "v": v, "mask": mask, "wanted": wanted}


def bigbird_transformers(tokens: int) -> Tensors:
    """Its random blocks are kept: it draws in training mode only, with numpy. Its masks are additive products of those of
    queries and keys."""
    module = importlib.import_module("transformers.models.big_bird.modeling_big_bird")
    configuration = importlib.import_module("transformers").BigBirdConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, block_size=4, num_random_blocks=2, max_position_embeddings=64
    )
    theirs = module.BigBirdBlockSparseAttention(configuration, seed=5).double().train()
    drawn, draw = [], theirs._bigbird_block_rand_mask_with_head
    theirs._bigbird_block_rand_mask_with_head = lambda **options: drawn.append(draw(**options)) or drawn[-1]
    x, mask = normal(2, tokens, HEADS * WIDTH), torch.ones(2, tokens, dtype=torch.bool)
    mask[1, tokens - 6 :] = False
    exists = mask.double()
    blocked = exists.view(2, -1, 4)
    near = torch.cat([blocked[:, 1:-3], blocked[:, 2:-2], blocked[:, 3:-1]], dim=2)
    wanted, _ = theirs(
        x,
        band_mask=torch.einsum("blq,blk->blqk", blocked[:, 2:-2], near)[:, None],
        from_mask=exists[:, None, :, None],
        to_mask=exists[:, None, None, :],
        from_blocked_mask=blocked,
        to_blocked_mask=blocked,
    )
    q, k, v = (split(f(x)) for f in (theirs.query, theirs.key, theirs.value))
    return {"q": q, "k": k, "v": v, "mask": mask, "blocks": torch.as_tensor(numpy.stack(drawn[0])), "wanted": wanted}


def reformer_transformers(tokens: int, num_hashes: int, masked: bool) -> Tensors:
    """In eval mode, with the rotations that its seed draws. It needs a length that is a multiple of the chunk, 4; its limit
    on hashes of one factor, which follows from max_position_embeddings, is ours."""
    module = importlib.import_module("transformers.models.reformer.modeling_reformer")
    configuration = importlib.import_module("transformers").ReformerConfig(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=WIDTH,
        lsh_attn_chunk_length=4,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        num_hashes=num_hashes,
        num_buckets=None,
        max_position_embeddings=64,
        is_decoder=False,
        hash_seed=9,
    )
    theirs = module.LSHSelfAttention(configuration).double().eval()
    x, mask = normal(2, tokens, HEADS * WIDTH), torch.ones(2, tokens, dtype=torch.bool)
    if masked:
        mask[0, tokens - 5 :] = False
    wanted = theirs(x, attention_mask=mask if masked else None).hidden_states
    q, v = (split(f(x)) for f in (theirs.query_key, theirs.value))
    buckets = torch.tensor(theirs.num_buckets).flatten()
    torch.manual_seed(9)
    rotations = normal(HEADS, WIDTH, num_hashes, int(buckets.sum()) // 2)
    found = {"q": q, "k": q.clone(), "v": v, "mask": mask, "wanted": wanted}
    return found | {"buckets": buckets, "rotations": rotations}


def performer_library(published: bool) -> Tensors:
    """It takes no mask, scales by D^-1/4 inside, and takes the max over the keys of a sample and head as we do. The published
    form scales once more and zeroes absent keys and values outside, as the Skyformer harness calls it."""
    theirs = importlib.import_module("performer_pytorch").FastAttention(dim_heads=WIDTH, nb_features=20).double()
    q, k, v = (normal(2, HEADS, n, WIDTH) for n in (7, 9, 9))
    mask = torch.arange(9) % 3 != torch.tensor([[1], [2]]) if published else torch.ones(2, 9, dtype=torch.bool)
    exists, scale = mask[:, None, :, None], WIDTH**-0.25 if published else 1.0
    wanted = theirs(q * scale, k * scale * exists, v * exists)
    return {"q": q, "k": k, "v": v, "mask": mask, "projection": theirs.projection_matrix, "wanted": joined(wanted)}


def linformer_library(keys: int) -> Tensors:
    """Linear layers of its own, set to what we know; one E for all heads, stored transposed; another E for the values, set to
    the same; and no mask."""
    theirs = importlib.import_module("linformer").LinformerSelfAttention(HEADS * WIDTH, seq_len=16, k=4, heads=HEADS).double()
    q, k = normal(2, 7, HEADS * WIDTH), normal(2, keys, HEADS * WIDTH)
    with torch.no_grad():
        for layer in (theirs.to_q, theirs.to_k, theirs.to_out):
            layer.weight.copy_(torch.eye(HEADS * WIDTH))
        theirs.to_out.bias.zero_()
        theirs.to_v.weight.normal_()
        theirs.proj_v.copy_(theirs.proj_k)
    projection = theirs.proj_k.mT.expand(HEADS, -1, -1)
    wanted = theirs(q, context=k)
    return {"q": split(q), "k": split(k), "v": split(theirs.to_v(k)), "projection": projection, "wanted": wanted}


# File → library, maker.
CASES: dict[str, tuple[str, Callable[[], Tensors]]] = {
    "nystrom-library": ("nystrom-attention", partial(nystrom_library, False)),
    "nystrom-library-masked": ("nystrom-attention", partial(nystrom_library, True)),
    "nystrom-exact": ("transformers", partial(nystrom_transformers, "exact", 2, 2)),
    "nystrom-original": ("transformers", partial(nystrom_transformers, "original", 1, 1)),
    "local": ("local-attention", partial(local_library, False)),
    "local-masked": ("local-attention", partial(local_library, True)),
    "longformer": ("transformers", longformer_transformers),
    "bigbird-48": ("transformers", partial(bigbird_transformers, 48)),
    "bigbird-64": ("transformers", partial(bigbird_transformers, 64)),
    "performer": ("performer-pytorch", partial(performer_library, False)),
    "performer-published": ("performer-pytorch", partial(performer_library, True)),
    "linformer-16": ("linformer", partial(linformer_library, 16)),
    "linformer-11": ("linformer", partial(linformer_library, 11)),
}
for _tokens, _hashes in ((8, 2), (24, 1), (24, 2), (24, 3), (64, 2)):
    for _masked in (False, True):
        _name = f"reformer-{_tokens}-{_hashes}{'-masked' * _masked}"
        CASES[_name] = ("transformers", partial(reformer_transformers, _tokens, _hashes, _masked))


def made(name: str) -> Tensors:
    """The tensors of a case, from its library, which must be installed."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    return {key: x.detach().contiguous() for key, x in CASES[name][1]().items()}


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        library = CASES[case][0]
        about = {"library": library, "version": version(library), "command": f"python tests/libraries.py {case}"}
        save_file(made(case), FOLDER / f"{case}.safetensors", about)
