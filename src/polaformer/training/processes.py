"""The processes that train together, and their device and precision: accelerate's, started by torchrun or SLURM."""

import os
import re
import warnings
from collections.abc import Mapping, MutableMapping

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from polaformer.errors import SettingsError

MIXED = {"fp32": "no", "fp64": "no", "bf16": "bf16", "fp16": "fp16"}


def start(precision: str = "fp32") -> Accelerator:
    """Joins the processes that torchrun or SLURM started; alone where neither did."""
    os.environ.update(slurm_variables(os.environ))
    on_cpu = not torch.cuda.is_available()
    if on_cpu and precision == "fp16":
        raise SettingsError("precision is 'fp16', which needs a GPU, and there is none; choose bf16 or fp32")
    # Of depthwise convolutions; it costs a copy and changes nothing.
    warnings.filterwarnings("ignore", message=".*Grad strides do not match bucket view strides")
    AcceleratorState._reset_state()  # a second training in one process may have another precision
    return Accelerator(mixed_precision=MIXED[precision], cpu=on_cpu)


def use_deterministic_algorithms() -> None:
    """Makes GPUs repeat to the last bit, where PyTorch can; where it cannot, it warns."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def sum_over(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The sum of a tensor of float64 over all processes, on the CPU."""
    if accelerator.num_processes == 1:
        return values
    on_device = values.to(accelerator.device)
    torch.distributed.all_reduce(on_device)
    return on_device.cpu()


def slurm_variables(environment: Mapping[str, str] | MutableMapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, from what `srun` set; {} outside `srun` or where torchrun did it."""
    if "RANK" in environment or int(environment.get("SLURM_NTASKS", "1")) < 2 or "SLURM_PROCID" not in environment:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1"))
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": per_node[0] if per_node else "1",
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000),
    }
    return {name: value for name, value in found.items() if name not in environment}


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: "node[007-012,20],other" is "node007"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + re.split(r"[-,\]]", rest)[0]
