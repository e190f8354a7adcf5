"""Measures the peak memory of a million tokens, forward and backward: python benchmarks/million_tokens.py

Peak resident memory, VmHWM of /proc/self/status: PyTorch itself, the inputs, the output, gradients and the buffers of the
kernels. It never decreases, so each line is the peak since the process started. Available on Linux only.
"""

import re
from pathlib import Path

import torch

import polaformer

TOKENS, HEADS, WIDTH = 2**20, 4, 32
GIB = 2**30


def peak_bytes() -> int:
    """The peak resident memory of the process so far."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), flags=re.M)
    assert found, "/proc/self/status has no VmHWM"
    return 1024 * int(found[1])


def main() -> None:
    """Prints one line per step."""
    tensor = 4 * TOKENS * HEADS * WIDTH
    print(f"{TOKENS} tokens, {HEADS} heads of {WIDTH}, float32, threads: {torch.get_num_threads()}")
    print(f"a tensor of that shape takes {tensor / GIB:.2f} GiB")
    print(f"{'after':10} {'peak (GiB)':>10} {'tensors':>8}")

    def report(step: str) -> None:
        print(f"{step:10} {peak_bytes() / GIB:10.2f} {peak_bytes() / tensor:8.2f}", flush=True)

    small = [torch.randn(1, HEADS, 64, WIDTH, requires_grad=True) for _ in range(3)]
    power = torch.full((HEADS, WIDTH), 3.0, requires_grad=True)
    polaformer.polarity_attention(*small, power).sum().backward()  # builds and loads the kernels
    report("loading")
    q, k, v = (torch.randn(1, HEADS, TOKENS, WIDTH, requires_grad=True) for _ in range(3))
    report("inputs")
    out = polaformer.polarity_attention(q, k, v, power)
    report("forward")
    out.backward(torch.ones_like(out))
    report("backward")


if __name__ == "__main__":
    main()
