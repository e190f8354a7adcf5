"""What this processor claims to support but does not."""

import functools
import os
import subprocess
import sys
from pathlib import Path

# On some virtual machines the processor claims AMX, and the first AMX instruction kills the process.
VARIABLE, WITHOUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
MATMUL = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


@functools.cache
def bfloat16_unavailable_reason() -> str | None:
    """Why PyTorch cannot multiply bfloat16 matrices here, and what helps, in one line; None if it can.

    Tried in a separate process, which takes seconds, and only if the processor claims AMX.
    """
    if VARIABLE in os.environ or not _claims_tiles():
        return None
    try:
        exit_code = subprocess.run([sys.executable, "-c", MATMUL], capture_output=True, timeout=300, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):  # inconclusive
        return None
    if exit_code >= 0:
        return None
    return (
        f"PyTorch's bfloat16 matmuls kill the process (signal {-exit_code}): the processor claims AMX but does not "
        f"have it; set {VARIABLE}={WITHOUT_TILES}"
    )


def _claims_tiles() -> bool:
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
