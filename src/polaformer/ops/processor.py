"""What this processor claims and cannot do."""

import functools
import os
import subprocess
import sys
from pathlib import Path

# Virtual machines exist whose processor claims AMX and ends the process at its first tile.
VARIABLE, WITHOUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


@functools.cache
def why_no_bfloat16() -> str | None:
    """Why PyTorch cannot multiply bfloat16 matrices here, and what helps, in one line; None if it can.

    Tried in a process of its own, which takes seconds, and only where the processor claims AMX.
    """
    if VARIABLE in os.environ or not _claims_tiles():
        return None
    try:
        ended = subprocess.run([sys.executable, "-c", PRODUCT], capture_output=True, timeout=300, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):  # nothing was found out
        return None
    if ended >= 0:
        return None
    return (
        f"PyTorch's products of bfloat16 matrices end the process (signal {-ended}): the processor claims AMX and does not "
        f"have it; set {VARIABLE}={WITHOUT_TILES}"
    )


def _claims_tiles() -> bool:
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
