"""What every training has in common, as a frozen dataclass that knows what is wrong with itself. Needs no PyTorch."""

import os
from dataclasses import dataclass
from math import isfinite

MOST_WORKERS = 256
MOST = 2**40  # of anything that is counted
LARGEST_RATE = 1e30
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
SHIPPED = ("last", "best")


def workers_for_cores(most: int) -> int:
    """Processes to read data: the cores for each training process of this machine, at least 1 and at most `most`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    trainings = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    return min(most, max(1, cores // (int(trainings) if trainings.isdecimal() and int(trainings) else 1)))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Numbers of a training. The rates are for `lr_images` images an update, and scaled in proportion to `batch_size`."""

    epochs: int = 300
    """Epochs of the schedule."""
    cooldown_epochs: int = 0
    """Epochs after the schedule, at the smallest rate."""
    warmup_epochs: int = 20
    """Epochs in which the rate rises; counted within the schedule."""
    batch_size: int = 1024
    """Images an update, over all processes."""
    accumulation: int = 1
    """Parts in which each process works through its share of an update, one after the other."""
    optimizer: str = "adamw"
    """One of timm's optimisers."""
    lr: float = 5e-4
    """Largest learning rate, for lr_images images an update."""
    warmup_lr: float = 5e-7
    """Learning rate of the first update, likewise."""
    min_lr: float = 5e-6
    """Learning rate at the end, likewise."""
    lr_images: int = 512
    """Images an update that the rates are for; 0: they are for the batch size as it is."""
    weight_decay: float = 0.05
    """Of all parameters but vectors, biases and those that the model names."""
    clip_norm: float | None = 5.0
    """Largest norm of the gradient; None: not clipped."""
    ema_decay: float | None = None
    """Decay of an average of the weights over updates, which is then evaluated and shipped; None: no average."""
    precision: str = "fp32"
    """fp32, bf16, fp16 (on GPUs), or fp64."""
    compile: bool = False
    """Let torch.compile compile the model."""
    grad_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    deterministic: bool = False
    """Use algorithms on GPUs that repeat to the last bit, at some cost; on CPUs they always do."""
    seed: int = 0
    """Of everything that is random."""
    num_workers: int = 4
    """Data workers per training process; results do not depend on it. Default of `train`: at most the cores per process."""
    eval_every: int = 1
    """Epochs between evaluations; there is one at the end in any case."""
    save_every: int | None = None
    """Updates between checkpoints; None: an epoch's. There is one at the end, and on a signal, in any case."""
    keep: int = 3
    """Checkpoints that are kept."""
    ship: str = "last"
    """Which weights are tested and shipped at the end: last, or best, those of the best evaluation."""
    log_every: int = 50
    """Updates between lines of the journal."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        found = [*self._wrong_counts(), *self._wrong_rates()]
        for name, allowed in (("precision", PRECISIONS), ("ship", SHIPPED)):
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if not found and self.warmup_epochs > self.epochs:
            found.append(f"warmup_epochs is {self.warmup_epochs}, but there are only {self.epochs} epochs")
        if not found and self.batch_size % self.accumulation:
            found.append(f"batch_size is {self.batch_size}, which accumulation, {self.accumulation}, does not divide")
        return found

    def _wrong_counts(self) -> list[str]:
        least = {"epochs": 1, "cooldown_epochs": 0, "warmup_epochs": 0, "batch_size": 1, "accumulation": 1, "lr_images": 0}
        least |= {"seed": 0, "num_workers": 0, "eval_every": 1, "save_every": 1, "keep": 3, "log_every": 1}
        values = {name: getattr(self, name) for name in least}
        found = [
            f"{name} is {value}; give a whole number of at least {least[name]}{' and below 2^40' if value > MOST else ''}"
            for name, value in values.items()
            if value is not None and not least[name] <= value <= MOST and not (name == "seed" and value > MOST)
        ]
        found += [f"seed is {self.seed}; give less than 2^63"] * (self.seed >= 2**63)
        return found + [f"num_workers is {self.num_workers}; give at most {MOST_WORKERS}"] * (self.num_workers > MOST_WORKERS)

    def _wrong_rates(self) -> list[str]:
        found = []
        for name in ("lr", "warmup_lr", "min_lr", "weight_decay"):
            value = getattr(self, name)
            if not 0 <= value <= LARGEST_RATE or (name == "lr" and value == 0):
                least = "above" if name == "lr" else "of at least"
                found.append(f"{name} is {value}; give a number {least} 0, and at most {LARGEST_RATE:g}")
        if not found and max(self.warmup_lr, self.min_lr) > self.lr:
            found.append(f"lr is {self.lr:g}; it must not be below warmup_lr, {self.warmup_lr:g}, or min_lr, {self.min_lr:g}")
        if self.clip_norm is not None and not (isfinite(self.clip_norm) and self.clip_norm > 0):
            found.append(f"clip_norm is {self.clip_norm}; give a number above 0, or None")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            found.append(f"ema_decay is {self.ema_decay}; give a number between 0 and 1, or None")
        return found

    def scaled(self, rate: float) -> float:
        """A rate for the batch size."""
        return rate * self.batch_size / self.lr_images if self.lr_images else rate
