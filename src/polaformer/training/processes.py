"""The processes of a training run, started by torchrun or SLURM, and their device and precision; uses accelerate."""

import os
import warnings

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from polaformer.errors import SettingsError
from polaformer.ops.processor import bfloat16_unavailable_reason
from polaformer.training.slurm import slurm_variables

MIXED = {"fp32": "no", "fp64": "no", "bf16": "bf16", "fp16": "fp16"}


def create_accelerator(precision: str = "fp32") -> Accelerator:
    """An accelerator that joins the processes started by torchrun or SLURM; a single process if neither did."""
    os.environ.update(slurm_variables(os.environ))
    on_cpu = not torch.cuda.is_available()
    if on_cpu and precision == "fp16":
        raise SettingsError("precision is 'fp16', which needs a GPU, but there is none; choose bf16 or fp32")
    if on_cpu and precision == "bf16" and (reason := bfloat16_unavailable_reason()):
        raise SettingsError(f"precision is 'bf16', but {reason}, or choose fp32")
    # Depthwise convolutions cause it; it costs a copy and changes no result.
    warnings.filterwarnings("ignore", message=".*Grad strides do not match bucket view strides")
    AcceleratorState._reset_state()  # a second training run in this process may have another precision
    return Accelerator(mixed_precision=MIXED[precision], cpu=on_cpu)


def use_deterministic_algorithms() -> None:
    """Makes GPU results bit-for-bit reproducible; PyTorch warns about operators for which it cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The sum of a float64 tensor over all processes, on the CPU."""
    if accelerator.num_processes == 1:
        return values
    on_device = values.to(accelerator.device)
    torch.distributed.all_reduce(on_device)
    return on_device.cpu()
