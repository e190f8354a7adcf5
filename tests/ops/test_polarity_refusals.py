"""What the operator says about bad input."""

import re

import pytest
import torch

from oracle import random_inputs
from polaformer.ops.polarity.operator import polarity_attention


def _bad_inputs():
    q, k, v, power = (x.detach() for x in random_inputs(dtype=torch.float32))
    mask = torch.ones(2, 5, dtype=torch.bool)
    return {
        "rank of q": ((q[0], k, v, power), {}, ValueError, "q has shape (3, 7, 6); give 4 axes"),
        "rank of k": ((q, k[0], v, power), {}, ValueError, "k has shape (3, 5, 6)"),
        "rank of v": ((q, k, v[None], power), {}, ValueError, "v has shape (1, 2, 3, 5, 6)"),
        "batch": ((q, k[:1], v[:1], power), {}, ValueError, "k has shape (1, 3, 5, 6) but q has shape (2, 3, 7, 6)"),
        "heads": ((q, k[:, :2], v[:, :2], power), {}, ValueError, "batch, heads and head width must agree"),
        "width": ((q, k[..., :4], v[..., :4], power), {}, ValueError, "head width must agree"),
        "v and k": ((q, k, v[:, :, :4], power), {}, ValueError, "v has shape (2, 3, 4, 6) but k has shape (2, 3, 5, 6)"),
        "width 1": ((q[..., :1], k[..., :1], v[..., :1], power[..., :1]), {}, ValueError, "head width 1; give at least 2"),
        "power shape": (
            (q, k, v, power[:2]),
            {},
            ValueError,
            "power has shape (2, 6) but q has 3 heads of width 6; give power of shape (3, 6) or (6,)",
        ),
        "power of four axes": ((q, k, v, power[None, :, None]), {}, ValueError, "give power of shape (3, 6) or (6,)"),
        "mask shape": (
            (q, k, v, power),
            {"mask": mask[:, :4]},
            ValueError,
            "mask has shape (2, 4) but there are 2 samples of 5 keys",
        ),
        "mask dtype": (
            (q, k, v, power),
            {"mask": mask.float()},
            TypeError,
            "mask has dtype torch.float32; give a boolean mask",
        ),
        "mask list": ((q, k, v, power), {"mask": mask.tolist()}, TypeError, "mask is a list"),
        "integers": ((q.long(), k, v, power), {}, TypeError, "q has dtype torch.int64; give a floating-point tensor"),
        "integer power": ((q, k, v, power.long()), {}, TypeError, "power has dtype torch.int64"),
        "complex": ((q.cfloat(), k, v, power), {}, TypeError, "q has dtype torch.complex64"),
        "float8": (
            (q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), power),
            {},
            TypeError,
            "q has dtype torch.float8_e4m3fn; give q, k and v in one of float32, float64, bfloat16, float16",
        ),
        "float8 keys": ((q, k.to(torch.float8_e4m3fn), v, power), {}, TypeError, "give them one dtype"),
        "array": ((q.numpy(), k, v, power), {}, TypeError, "q is a ndarray; give a torch.Tensor"),
        "dtypes": (
            (q, k.half(), v, power),
            {},
            TypeError,
            "q, k and v have dtypes torch.float32, torch.float16 and torch.float32",
        ),
        "narrow power": (
            (q, k, v, power.half()),
            {},
            TypeError,
            "power has dtype torch.float16, which cannot hold torch.float32",
        ),
        "bf16 power for fp16": ((q.half(), k.half(), v.half(), power.bfloat16()), {}, TypeError, "cannot hold torch.float16"),
        "devices": ((q, k.to("meta"), v, power), {}, ValueError, "different devices (q on cpu, k on meta"),
        "backend": (
            (q, k, v, power),
            {"backend": "tritn"},
            ValueError,
            "backend is 'tritn'; choose one of auto, torch, cpu, triton, reference",
        ),
        "negative eps": ((q, k, v, power), {"eps": -1e-6}, ValueError, "eps is -1e-06; give 0"),
        "eps not a number": ((q, k, v, power), {"eps": float("nan")}, ValueError, "eps is nan"),
        "eps infinite": ((q, k, v, power), {"eps": float("inf")}, ValueError, "eps is inf"),
        "eps a string": ((q, k, v, power), {"eps": "1e-6"}, TypeError, "eps is a str; give a number"),
    }


@pytest.mark.parametrize("case", _bad_inputs())
def test_bad_input_is_refused_with_what_was_given_and_what_to_give(case):
    arguments, options, error, message = _bad_inputs()[case]
    with pytest.raises(error, match=re.escape(message)):
        polarity_attention(*arguments, **options)
