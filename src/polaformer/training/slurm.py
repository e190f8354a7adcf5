"""The environment variables that torchrun would set, derived from those of SLURM's `srun`. Needs no PyTorch."""

import re
from collections.abc import Mapping


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, …; {} outside `srun` (a batch script alone is one process), or if torchrun already set them."""
    is_step = "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment
    number = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "RANK" in environment or not is_step or int(number) < 2:
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1"))
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": number,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": per_node[0] if per_node else "1",
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000),
    }
    return {name: value for name, value in found.items() if name not in environment}


def first_host(nodes: str) -> str:
    """The first host of SLURM's node list: "node007" for "node[007-012,20],other"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + re.split(r"[-,\]]", rest)[0]


def num_processes(environment: Mapping[str, str]) -> int:
    """How many processes torchrun or SLURM started; 1 if neither did."""
    return int((dict(environment) | slurm_variables(environment)).get("WORLD_SIZE", "1"))
