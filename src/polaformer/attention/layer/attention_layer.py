"""The multi-head attention layer around any core, and PolaAttention, the paper's layer.

    q, k, v = projections;  k += table of key positions;  out = proj( (core(q, k, v) + conv(v)) ⊙ gate(x) )

The core owns what its formula needs (powers, scales, feature maps). The layer owns the projections, the gate, the convolution
branch, the key reduction, the key positions and the prefix tokens; all but the projections are optional, so that the
paper's ablations differ in arguments only.

# B batch, N tokens of x, M tokens of the source of keys, C = num_heads · D channels, P prefix tokens
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polaformer.attention.core import Bias, Core, Mask, Size
from polaformer.attention.layer.checks import (
    check_core,
    check_gate_bias,
    check_grid,
    check_kernel,
    check_key_positions,
    check_mask,
    check_options,
    check_sizes,
    check_tokens,
    check_width,
)
from polaformer.attention.layer.gate import LinearGate, MatrixGate
from polaformer.attention.layer.key_reduction import KeyReduction
from polaformer.attention.layer.parameter_names import translate_published_names
from polaformer.attention.layer.token_table import TokenTable
from polaformer.attention.layer.value_convolution import (
    SequenceConvolution,
    convolve_tokens,
    create_convolution,
    is_plain_depthwise,
    stretch_tokens,
)
from polaformer.attention.mechanisms.pola import PolaCore
from polaformer.ops.allocator import keep_freed_memory
from polaformer.ops.gated_convolution.operator import gated_convolution
from polaformer.ops.grid import Grid, Sizes

Tokens = Tensor | None  # (B, M, C)


class AttentionLayer(nn.Module):
    """Multi-head attention with the given core; called as `layer(x, grid=(H, W), mask=None, context=None)`.

    conv: a convolution of the values, added to the core's output: "depthwise" (all heads share the filters), "channelwise" (a
        filter per channel), "deformable", "sequence" (a filter per head along all tokens in order) or None.
    kernel_size: of the convolution; k means k×k, a pair is (height, width); odd numbers.
    gate: "linear" (a projection of the input), "matrix" (a free N × C matrix, sized by `key_positions`) or None.
    gate_init: "default" (as published), "kaiming_uniform", "zeros", "normal", "uniform" or "ones", for the gate's weight.
    gate_bias_init: of a linear gate, "zeros", "ones" or "linear" (as PyTorch's linear layers); "default": with the default
        `gate_init` zeros, as published, otherwise "linear".
    key_positions: the native (height, width) of the tokens, or their number for sequences: a learnable table is added to the
        keys, resized bicubically to any other size. None: no table.
    reduction: r > 1 takes keys and values from r×r squares of tokens, as in PVT; prefix tokens are not reduced.
    num_prefix_tokens: tokens before the grid (a class token); they skip reduction and every convolution but "sequence".
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        core: Core,
        *,
        conv: str | None = None,
        kernel_size: int | tuple[int, int] = 5,
        gate: str | None = None,
        gate_init: str = "default",
        gate_bias_init: str = "default",
        key_positions: int | Grid | None = None,
        reduction: int = 1,
        qkv_bias: bool = True,
        num_prefix_tokens: int = 0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        keep_freed_memory()
        check_width(dim, num_heads)
        check_core(core, dim, num_heads)
        kernel, key_positions = check_kernel(kernel_size), check_key_positions(key_positions)
        check_options(conv, kernel, gate, gate_init, key_positions, reduction, num_prefix_tokens, proj_drop)
        check_gate_bias(gate, gate_bias_init, qkv_bias)
        self.dim, self.num_heads, self.num_prefix_tokens = dim, num_heads, num_prefix_tokens
        self.for_sequences = isinstance(key_positions, int)
        self.core = core
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)  # rows: q, k, v
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.conv = create_convolution(conv, num_heads, dim // num_heads, kernel)
        self.key_reduction = KeyReduction(dim, reduction) if reduction > 1 else None

        self.key_positions: TokenTable | None = None
        self.gate: LinearGate | MatrixGate | None = None
        if key_positions is not None:
            native = (1, key_positions) if isinstance(key_positions, int) else key_positions
            self.key_positions = TokenTable(self._key_grid(native), dim, num_prefix_tokens)
            if gate == "matrix":
                self.gate = MatrixGate(native, dim, num_prefix_tokens, init=gate_init)
        if gate == "linear":
            self.gate = LinearGate(dim, bias=qkv_bias, init=gate_init, bias_init=gate_bias_init)
        self._initialise()
        self.register_load_state_dict_pre_hook(translate_published_names)

    def forward(
        self, x: Tensor, grid: Size = None, mask: Mask = None, context: Tokens = None, *, sizes: Sizes = None, bias: Bias = None
    ) -> Tensor:
        """x (B, N, C) to (B, N, C).

        grid: (height, width) of the tokens after the prefix, row by row; None: a plain sequence, convolved in one dimension.
        mask: (B, N), or (B, M) with a context; True where the token exists (the opposite of PyTorch's `key_padding_mask`).
            Masked tokens have no effect on others, neither as keys nor as queries. To mask tokens as keys only, give them as
            the context too: `layer(x, context=x, mask=mask)`. A core that `reads_masked`, as some are published, reads masked
            tokens all the same.
        context: (B, M, C), the source of keys and values instead of x; it may be x itself. The mask then applies to keys only,
            even if M = N. The convolution branch is skipped unless M = N. Cores without cross-attention refuse a context.
        sizes: the (height, width) of each sample's image at the top left of the grid, in a batch of images of different sizes.
            Tables and the matrix gate are then sized by the image, not the grid; the mask still marks which tokens exist.
        bias: added to the scores, broadcastable to (B, H, N, M); for cores that form scores (softmax).
        """
        x, source, size = self._inputs(x, grid, mask, context, sizes)
        q, k, v, mask = self._queries_keys_values(x, source, size, mask, sizes)
        out = self.core(self._split(q), self._split(k), self._split(v), mask=mask, bias=bias, grid=size, **_cross(context))
        out = out.transpose(1, 2).flatten(2)  # (B, N, C)
        gate = None if self.gate is None else self.gate(x, size, sizes)
        num_skipped = 0 if isinstance(self.conv, SequenceConvolution) else self.num_prefix_tokens
        if self.conv is not None and source.shape[1] == x.shape[1] > num_skipped:
            out = self._with_convolution(out, v, gate, mask, size, sizes)
        elif gate is not None:
            out = out * gate
        return self.proj_drop(self.proj(out))

    def maps(
        self, x: Tensor, grid: Size = None, mask: Mask = None, context: Tokens = None, *, sizes: Sizes = None, bias: Bias = None
    ) -> dict[str, Tensor]:
        """The attention maps that forward applies for the same arguments, by name, each (B, H, N, M).

        PolaAttention gives "same" (for the first ceil(D/2) channels of v of each head) and "opposite" (for the others).
        """
        x, source, size = self._inputs(x, grid, mask, context, sizes)
        q, k, _, mask = self._queries_keys_values(x, source, size, mask, sizes)
        return self.core.weights(self._split(q), self._split(k), mask=mask, bias=bias, grid=size, **_cross(context))

    def set_grid(self, grid: Grid) -> None:
        """Makes the grid the native size permanently: tables are resized to it.

        Raises ValueError if the core was created for fewer tokens, or keys.
        """
        facts = self.core.facts
        for what, most, size in (("tokens", facts.max_length, grid), ("keys", facts.max_keys, self._key_grid(grid))):
            wanted = self.num_prefix_tokens + size[0] * size[1]
            if most is not None and wanted > most:
                raise ValueError(
                    f"{type(self).__name__}: the grid {grid} has {wanted} {what}, but the attention was created for at most "
                    f"{most}; create the model or layer for the larger size"
                )
        if self.key_positions is not None:
            self.key_positions.resize(self._key_grid(grid))
        if isinstance(self.gate, MatrixGate):
            self.gate.resize(grid)

    def _inputs(self, x: Tensor, grid: Size, mask: Mask, context: Tokens, sizes: Sizes) -> tuple[Tensor, Tensor, Grid]:
        """x and the source of keys, with masked tokens zeroed unless the core reads them, and the grid."""
        source = x if context is None else context
        size = self._check_call(x, source, grid, mask)
        if sizes is not None:
            check_sizes(type(self).__name__, sizes, x.shape[0], grid, same_length=source.shape[1] == x.shape[1])
        if mask is not None and not self.core.facts.reads_masked:
            # Before the projections: NaN in masked tokens would otherwise reach their gradients.
            source = source.masked_fill(~mask[..., None], 0.0)
        return (source if context is None else x), source, size

    def _queries_keys_values(
        self, x: Tensor, source: Tensor, grid: Grid, mask: Tensor | None, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q (B, N, C), k and v (B, n, C) and the mask of the keys (B, n), n = M unless reduced."""
        same_length, keys_from = source.shape[1] == x.shape[1], source
        if self.key_reduction is not None:
            keys_from, mask = self._reduced(source, grid, mask)
        if keys_from is x:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            weight, bias = self.qkv.weight, self.qkv.bias
            q = F.linear(x, weight[: self.dim], None if bias is None else bias[: self.dim])
            k, v = F.linear(keys_from, weight[self.dim :], None if bias is None else bias[self.dim :]).chunk(2, dim=-1)
        if self.key_positions is not None:
            key_grid = self._key_grid(grid) if same_length else self._context_grid(source.shape[1])
            k = k + self.key_positions(key_grid, self._key_sizes(sizes)).to(k.dtype)
        return q, k, v, mask

    def _reduced(self, tokens: Tensor, grid: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert self.key_reduction is not None
        num_prefix = self.num_prefix_tokens
        cells, cell_mask = self.key_reduction(tokens[:, num_prefix:], grid, None if mask is None else mask[:, num_prefix:])
        if num_prefix == 0:
            return cells, cell_mask
        if mask is not None:
            cell_mask = torch.cat([mask[:, :num_prefix], cell_mask], dim=1)
        return torch.cat([tokens[:, :num_prefix], cells], dim=1), cell_mask

    def _with_convolution(
        self, out: Tensor, v: Tensor, gate: Tensor | None, mask: Tensor | None, grid: Grid, sizes: Sizes
    ) -> Tensor:
        """(out + convolution of the values) ⊙ gate, (B, N, C); only "sequence" convolves prefix tokens."""
        if mask is not None:
            v = v.masked_fill(~mask[..., None], 0.0)
        if isinstance(self.conv, SequenceConvolution):
            out = out + self.conv(self._split(v)).transpose(1, 2).flatten(2)
            return out if gate is None else out * gate
        cells = v[:, self.num_prefix_tokens :]
        if self.key_reduction is not None:
            cells = stretch_tokens(cells, self._key_grid(grid), grid, self._key_sizes(sizes), sizes)
        if is_plain_depthwise(self.conv):
            return gated_convolution(out, cells, self.conv.weight, self.conv.bias, gate, grid)
        assert self.conv is not None
        heads = 1 if isinstance(self.conv, nn.Conv2d) and self.conv.in_channels == self.dim else self.num_heads
        out = out + F.pad(convolve_tokens(self.conv, cells, grid, heads), (0, 0, self.num_prefix_tokens, 0))
        return out if gate is None else out * gate

    def _split(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, heads, N, D), without a copy."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _key_grid(self, grid: Grid) -> Grid:
        return grid if self.key_reduction is None else self.key_reduction.reduced_grid(grid)

    def _key_sizes(self, sizes: Sizes) -> list[Grid] | None:
        return None if sizes is None else [self._key_grid(size) for size in sizes]

    def _context_grid(self, num_tokens: int) -> Grid:
        """The grid of the key table for a context that is not as long as x."""
        assert self.key_positions is not None
        return (1, num_tokens - self.num_prefix_tokens) if self.for_sequences else self.key_positions.size

    def _initialise(self) -> None:
        """As published: truncated normal weights, zero biases; convolutions keep PyTorch's default."""
        for linear in (self.qkv, self.proj):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def _check_call(self, x: Tensor, source: Tensor, grid: Grid | None, mask: Tensor | None) -> Grid:
        """Raises unless the arguments fit the layer and each other; returns the grid, (1, tokens) for a sequence."""
        name, num_prefix = type(self).__name__, self.num_prefix_tokens
        check_tokens(name, "x", x, self.dim, self.qkv.weight)
        check_tokens(name, "context", source, self.dim, self.qkv.weight)
        if source.shape[0] != x.shape[0]:
            raise ValueError(f"{name}: context has {source.shape[0]} samples but x has {x.shape[0]}; give equal batch sizes")
        if mask is not None:
            check_mask(name, mask, source)
        if min(x.shape[1], source.shape[1]) < num_prefix:
            raise ValueError(f"{name}: x and context must hold the {num_prefix} prefix tokens; x has {x.shape[1]} tokens")
        if source.shape[1] == x.shape[1]:
            self._check_own_grid(grid)
        else:
            self._check_context(source.shape[1], x.shape[1])
        if grid is None:
            return 1, x.shape[1] - num_prefix
        return check_grid(name, grid, x.shape[1], num_prefix)

    def _check_own_grid(self, grid: Grid | None) -> None:
        """Raises unless the grid fits the layer; for keys that share the grid of x, being from the same number of tokens."""
        name = type(self).__name__
        if grid is not None and self.for_sequences:
            raise ValueError(f"{name}: key_positions was given as a number of tokens, for sequences; leave grid out")
        needs = {
            "a table of key positions for a grid": self.key_positions is not None and not self.for_sequences,
            "a key reduction": self.key_reduction is not None,
            "a deformable convolution": self.conv is not None and not isinstance(self.conv, nn.Conv2d),
        }
        for what, needed in needs.items():
            if needed and grid is None:
                raise ValueError(f"{name}: this layer has {what}, which is undefined on a sequence; give grid=(height, width)")

    def _check_context(self, num_context: int, num_tokens: int) -> None:
        """Raises unless the layer supports a context of another length than x, whose grid is unknown."""
        name = type(self).__name__
        if self.key_reduction is not None:
            raise ValueError(
                f"{name}: a context of {num_context} tokens has no grid to reduce (x has {num_tokens}); "
                "give a context as long as x, or build the layer with reduction=1"
            )
        if self.key_positions is not None and not self.for_sequences and num_context != len(self.key_positions.rows):
            raise ValueError(
                f"{name}: context has {num_context} tokens but the table of key positions has "
                f"{len(self.key_positions.rows)} rows and the context's grid is unknown; give a context of that length"
            )


def _cross(context: Tensor | None) -> dict[str, bool]:
    """The argument `cross` of a core; omitted without a context, so that cores without that argument can be used."""
    return {} if context is None else {"cross": True}


class PolaAttention(AttentionLayer):
    """The paper's attention layer: polarity-aware linear attention, gate and convolution, on a grid or a sequence.

    Its own arguments: alpha (1 < p < 1 + alpha), polarity ("both", "same", "positive", "subtract"), learn_scale (divides q
    and k by softplus(scale)), shared_power (the same p for all heads), eps (0: the paper; 1e-6: the authors' code), backend.
    The others are those of AttentionLayer, with the authors' choices as defaults. `load_state_dict` also accepts the authors'
    parameter names.
    """

    core: PolaCore

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        alpha: float = 4.0,
        kernel_size: int | tuple[int, int] = 5,
        conv: str | None = "depthwise",
        gate: str | None = "linear",
        gate_init: str = "default",
        gate_bias_init: str = "default",
        polarity: str = "both",
        key_positions: int | Grid | None = None,
        reduction: int = 1,
        qkv_bias: bool = True,
        learn_scale: bool = True,
        shared_power: bool = False,
        num_prefix_tokens: int = 0,
        proj_drop: float = 0.0,
        eps: float = 0.0,
        backend: str = "auto",
    ) -> None:
        check_width(dim, num_heads)
        core = PolaCore(
            num_heads,
            dim // num_heads,
            alpha=alpha,
            polarity=polarity,
            learn_scale=learn_scale,
            shared_power=shared_power,
            eps=eps,
            backend=backend,
        )
        super().__init__(
            dim,
            num_heads,
            core,
            conv=conv,
            kernel_size=kernel_size,
            gate=gate,
            gate_init=gate_init,
            gate_bias_init=gate_bias_init,
            key_positions=key_positions,
            reduction=reduction,
            qkv_bias=qkv_bias,
            num_prefix_tokens=num_prefix_tokens,
            proj_drop=proj_drop,
        )
