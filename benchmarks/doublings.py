"""How the operator's time grows with the number of tokens, alone in a warm process: python benchmarks/doublings.py

`polaformer bench op --lengths` takes all lengths and all contenders in turns, so that every call finds cold caches and memory
that the published form has just used by the gigabyte. Here each length is called in a row and the best time counts.
"""

import time

import torch

import polaformer

LENGTHS = [4096 * 2**i for i in range(9)]
HEADS, WIDTH, SECONDS = 4, 32, 5.0


def best_time(num_tokens: int) -> float:
    """Seconds of the quickest call within a few seconds of calls."""
    q, k, v = (torch.randn(1, HEADS, num_tokens, WIDTH) for _ in range(3))
    power = torch.full((HEADS, WIDTH), 3.0)
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 5:
        begin = time.perf_counter()
        polaformer.polarity_attention(q, k, v, power)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Prints a line for each length."""
    before = None
    with torch.no_grad():
        for num_tokens in LENGTHS:
            found = best_time(num_tokens)
            growth = "" if before is None else f"{found / before:.2f} times the last"
            print(
                f"{num_tokens:8d} tokens {1e3 * found:9.3f} ms {1e9 * found / num_tokens:6.0f} ns a token  {growth}", flush=True
            )
            before = found


if __name__ == "__main__":
    main()
