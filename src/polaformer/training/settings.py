"""What every training has in common, as a frozen dataclass that knows what is wrong with itself. Needs no PyTorch."""

import os
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

MOST_WORKERS = 256
MOST = 2**40  # of anything that is counted
LARGEST_RATE = 1e30
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
SHIPPED = ("last", "best")
SCHEDULES = ("cosine", "one-cycle", "polynomial", "multi-step", "constant")
ANNEALINGS = ("cosine", "linear")


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers_for_cores(most: int) -> int:
    """Processes to read data: the cores for each training process of this machine, at least 1 and at most `most`."""
    cores = available_cores()
    trainings = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    return min(most, max(1, cores // (int(trainings) if trainings.isdecimal() and int(trainings) else 1)))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Numbers of a training. The rates are for `lr_images` samples per update, and scaled in proportion to `batch_size`."""

    epochs: int = 300
    """Epochs of the schedule."""
    steps: int | None = None
    """Updates of the schedule, instead of epochs."""
    cooldown_epochs: int = 0
    """Epochs after the schedule, at the smallest rate."""
    warmup_epochs: int = 20
    """Epochs in which the rate rises; counted within the schedule."""
    warmup_steps: int | None = None
    """Updates in which the rate rises, instead of warmup_epochs."""
    batch_size: int = 1024
    """Samples per update, over all processes."""
    accumulation: int = 1
    """Parts in which each process works through its share of an update, one after the other."""
    optimizer: str = "adamw"
    """One of timm's optimisers."""
    schedule: str = "cosine"
    """Shape of the learning rate: cosine, one-cycle, polynomial, multi-step or constant."""
    lr: float = 5e-4
    """Largest learning rate, for lr_images samples per update."""
    warmup_lr: float = 5e-7
    """Learning rate of the first update, likewise."""
    min_lr: float = 5e-6
    """Learning rate at the end, likewise; multi-step and constant have none."""
    lr_images: int = 512
    """Samples per update that the rates are for, which follow batch_size; 0: they are for any batch size."""
    anneal: str = "cosine"
    """How a one-cycle schedule rises and falls: cosine or linear."""
    momentum_cycle: tuple[float, float] | None = None
    """Momentum, or Adam's beta1, of a one-cycle schedule at its ends and at its peak; None: the optimiser's own throughout."""
    poly_power: float = 1.0
    """Power of a polynomial schedule."""
    milestones: tuple[int, ...] = ()
    """Where a multi-step schedule lowers the rate: in epochs, or in updates if steps is given."""
    lr_decay: float = 0.1
    """Factor by which a multi-step schedule lowers the rate."""
    layer_decay: float | None = None
    """Factor of the learning rate per layer below the head; None: the same rate for all layers."""
    frozen_stages: int = 0
    """Stages (of a DeiT: blocks) that are not trained, counted from the input, and the patch embedding; 0: all are trained."""
    weight_decay: float = 0.05
    """Of all parameters but vectors, biases and those that the model names."""
    no_decay: tuple[str, ...] = ()
    """Names of further parameters without weight decay, with wildcards, such as "*relative_positions*"."""
    clip_norm: float | None = 5.0
    """Largest norm of the gradient; None: not clipped."""
    clip_value: float | None = None
    """Largest absolute value of each entry of the gradient, instead of clip_norm; None: not clipped."""
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
    eval_every_steps: int | None = None
    """Updates between evaluations, instead of eval_every."""
    save_every: int | None = None
    """Updates between checkpoints; None: one per epoch. There is one at the end, and on a signal, in any case."""
    save_every_epochs: int | None = None
    """Epochs between checkpoints, instead of save_every."""
    keep: int = 3
    """Checkpoints that are kept."""
    ship: str = "last"
    """Which weights are tested and shipped at the end: last, or best, those of the best evaluation."""
    log_every: int = 50
    """Updates between lines of the journal; there is one at the end of each epoch as well."""
    log_every_epochs: int | None = None
    """Epochs between lines of the journal, instead of log_every; there is one at the end in any case."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        found = [*self._wrong_counts(), *self._wrong_rates(), *self._wrong_clipping(), *self._wrong_schedule()]
        for name, allowed in (("precision", PRECISIONS), ("ship", SHIPPED)):
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if not found:
            found += self._wrong_times()
        if not found and self.batch_size % self.accumulation:
            found.append(f"batch_size is {self.batch_size}, which accumulation, {self.accumulation}, does not divide")
        return found

    def _wrong_counts(self) -> list[str]:
        least = {"epochs": 1, "cooldown_epochs": 0, "warmup_epochs": 0, "batch_size": 1, "accumulation": 1, "lr_images": 0}
        least |= {"seed": 0, "num_workers": 0, "eval_every": 1, "save_every": 1, "keep": 3, "log_every": 1}
        least |= {"steps": 1, "warmup_steps": 0, "eval_every_steps": 1, "save_every_epochs": 1, "log_every_epochs": 1}
        least |= {"frozen_stages": 0}
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
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            found.append(f"layer_decay is {self.layer_decay}; give a number above 0, up to 1, or None")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            found.append(f"ema_decay is {self.ema_decay}; give a number between 0 and 1, or None")
        return found

    def _wrong_clipping(self) -> list[str]:
        limits = {"clip_norm": self.clip_norm, "clip_value": self.clip_value}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        wrong = {name: limit for name, limit in given.items() if not (isfinite(limit) and limit > 0)}
        found = [f"{name} is {limit}; give a number above 0, or None" for name, limit in wrong.items()]
        if len(given) == 2:
            found.append(
                f"clip_norm is {self.clip_norm:g} and clip_value is {self.clip_value:g}, but gradients are clipped in one way; "
                "to clip by value pass --clip-norm None, to clip by norm --clip-value None"
            )
        return found

    def _wrong_schedule(self) -> list[str]:
        found = []
        for name, allowed in (("schedule", SCHEDULES), ("anneal", ANNEALINGS)):
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if not (isfinite(self.poly_power) and self.poly_power > 0):
            found.append(f"poly_power is {self.poly_power}; give a number above 0")
        if not 0 < self.lr_decay <= 1:
            found.append(f"lr_decay is {self.lr_decay}; give a number above 0, up to 1")
        return found + self._wrong_momentum() + self._wrong_milestones()

    def _wrong_momentum(self) -> list[str]:
        if self.momentum_cycle is None:
            return []
        ends, peak = self.momentum_cycle
        if not (0 <= ends < 1 and 0 <= peak < 1):
            return [f"momentum_cycle is {ends:g} and {peak:g}; give two numbers of at least 0 and below 1, or None"]
        if self.schedule != "one-cycle":
            return [f"momentum_cycle is for schedule one-cycle, but schedule is {self.schedule!r}; change one of them"]
        return []

    def _wrong_milestones(self) -> list[str]:
        given, multi_step = self.milestones, self.schedule == "multi-step"
        if bool(given) != multi_step:
            asked = "give some with --milestones" if multi_step else "only multi-step has any; change one of them"
            return [f"schedule is {self.schedule!r} and milestones is {given or 'empty'}; {asked}"]
        unit, end = ("epochs", self.epochs) if self.steps is None else ("steps", self.steps)
        if any(not before < after for before, after in pairwise((0, *given, end))) and given:
            return [f"milestones is {given}; give growing numbers of {unit}, above 0 and below {end}, where the schedule ends"]
        return []

    def _wrong_times(self) -> list[str]:
        """What contradicts itself whatever the data; `Timeline.problems` tells what depends on them."""
        found = []
        if self.steps is None and self.warmup_steps is None and self.warmup_epochs > self.epochs:
            found.append(f"warmup_epochs is {self.warmup_epochs}, but there are only {self.epochs} epochs")
        if self.steps is not None and self.warmup_steps is not None and self.warmup_steps > self.steps:
            found.append(f"warmup_steps is {self.warmup_steps}, but there are only {self.steps} steps; give at most as many")
        if self.save_every is not None and self.save_every_epochs is not None:
            found.append(
                f"save_every is {self.save_every} updates and save_every_epochs is {self.save_every_epochs} epochs; give one: "
                "to save by epochs pass --save-every None"
            )
        return found

    @property
    def num_epochs(self) -> int | None:
        """Epochs of the whole training; None where `steps` counts updates instead."""
        return self.epochs + self.cooldown_epochs if self.steps is None else None

    def scaled(self, rate: float) -> float:
        """A rate for the batch size."""
        return rate * self.batch_size / self.lr_images if self.lr_images else rate
