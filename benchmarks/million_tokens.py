"""The most memory that a process holds for a million tokens, forward and backward: python benchmarks/million_tokens.py

Resident memory, VmHWM of /proc/self/status: PyTorch itself, the inputs, the result, gradients and all that a kernel takes for
itself. It only ever rises, so each line is the peak since the process began. Linux alone tells it.
"""

import re
from pathlib import Path

import torch

import polaformer

TOKENS, HEADS, WIDTH = 2**20, 4, 32
GIB = 2**30


def peak_bytes() -> int:
    """The most that the process has held so far."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), flags=re.M)
    assert found, "/proc/self/status has no VmHWM"
    return 1024 * int(found[1])


def main() -> None:
    """Prints a line for each step."""
    tensor = 4 * TOKENS * HEADS * WIDTH
    print(f"{TOKENS} tokens, {HEADS} heads of {WIDTH}, float32, threads: {torch.get_num_threads()}")
    print(f"a tensor of that shape takes {tensor / GIB:.2f} GiB")
    print(f"{'after':10} {'peak (GiB)':>10} {'tensors':>8}")

    def tell(step: str) -> None:
        print(f"{step:10} {peak_bytes() / GIB:10.2f} {peak_bytes() / tensor:8.2f}", flush=True)

    small = [torch.randn(1, HEADS, 64, WIDTH, requires_grad=True) for _ in range(3)]
    power = torch.full((HEADS, WIDTH), 3.0, requires_grad=True)
    polaformer.polarity_attention(*small, power).sum().backward()  # builds and loads what is needed
    tell("loading")
    q, k, v = (torch.randn(1, HEADS, TOKENS, WIDTH, requires_grad=True) for _ in range(3))
    tell("inputs")
    out = polaformer.polarity_attention(q, k, v, power)
    tell("forward")
    out.backward(torch.ones_like(out))
    tell("backward")


if __name__ == "__main__":
    main()
