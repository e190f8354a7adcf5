"""Measures how the operator's time grows with the number of tokens in a warm process: python benchmarks/doublings.py

`polaformer bench op --lengths` alternates between all lengths and contenders, so every call starts with cold caches, after the
published form has just used gigabytes of memory. Here all calls of a length follow each other, and the best time counts.
"""

import time

import torch

import polaformer

LENGTHS = [4096 * 2**i for i in range(9)]
HEADS, WIDTH, SECONDS = 4, 32, 5.0


def best_time(num_tokens: int) -> float:
    """The time in seconds of the fastest call, of SECONDS seconds of calls and at least five."""
    q, k, v = (torch.randn(1, HEADS, num_tokens, WIDTH) for _ in range(3))
    power = torch.full((HEADS, WIDTH), 3.0)
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 5:
        begin = time.perf_counter()
        polaformer.polarity_attention(q, k, v, power)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Prints one line per length."""
    before = None
    with torch.no_grad():
        for num_tokens in LENGTHS:
            found = best_time(num_tokens)
            growth = "" if before is None else f"{found / before:.2f} times the previous"
            per_token = 1e9 * found / num_tokens
            print(f"{num_tokens:8d} tokens {1e3 * found:9.3f} ms {per_token:6.0f} ns per token  {growth}", flush=True)
            before = found


if __name__ == "__main__":
    main()
