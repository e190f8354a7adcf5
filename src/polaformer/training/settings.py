"""The settings of every training run: a frozen dataclass that reports its own problems. Needs no PyTorch."""

import os
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

MAX_WORKERS = 256
MAX_COUNT = 2**40
MAX_RATE = 1e30
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
SHIPPED = ("last", "best")
SCHEDULES = ("cosine", "one-cycle", "polynomial", "multi-step", "constant")
ANNEALINGS = ("cosine", "linear")


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers_for_cores(most: int) -> int:
    """Number of data workers: the cores per training process on this machine, at least 1 and at most `most`."""
    cores = available_cores()
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    return min(most, max(1, cores // (int(processes) if processes.isdecimal() and int(processes) else 1)))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training run. Learning rates are for `lr_images` samples per update, and scale with `batch_size`."""

    epochs: int = 300
    """Epochs of the schedule."""
    steps: int | None = None
    """Updates of the schedule, instead of epochs."""
    cooldown_epochs: int = 0
    """Epochs after the schedule, at its last learning rate."""
    warmup_epochs: int = 20
    """Epochs of warm-up, in which the learning rate rises; part of the schedule."""
    warmup_steps: int | None = None
    """Updates of warm-up, instead of warmup_epochs."""
    batch_size: int = 1024
    """Samples per update, over all processes."""
    accumulation: int = 1
    """Gradient accumulation: micro-batches per update in each process."""
    optimizer: str = "adamw"
    """Name of one of timm's optimisers."""
    optimizer_eps: float | None = None
    """Epsilon of the optimiser, for those that have one; None: its default."""
    schedule: str = "cosine"
    """Learning rate schedule: cosine, one-cycle, polynomial, multi-step or constant."""
    lr: float = 5e-4
    """Largest learning rate, for lr_images samples per update; a one-cycle recipe's warmup_lr and min_lr change with it."""
    warmup_lr: float = 5e-7
    """Learning rate of the first update of a warm-up, for lr_images samples per update."""
    min_lr: float = 5e-6
    """Learning rate at the end of the schedule, for lr_images samples per update; not used by multi-step and constant."""
    lr_images: int = 512
    """Samples per update that the learning rates are for; they scale with batch_size. 0: do not scale them."""
    anneal: str = "cosine"
    """Shape of the rise and fall of a one-cycle schedule: cosine or linear."""
    momentum_cycle: tuple[float, float] | None = None
    """Momentum, or Adam's beta1, at the ends and at the peak of a one-cycle schedule; None: the optimiser's default."""
    poly_power: float = 1.0
    """Power of a polynomial schedule."""
    milestones: tuple[int, ...] = ()
    """When a multi-step schedule lowers the learning rate: in epochs, or in updates if steps is given."""
    lr_decay: float = 0.1
    """Factor of the learning rate at each milestone of a multi-step schedule."""
    layer_decay: float | None = None
    """Factor of the learning rate per layer below the head; None: the same learning rate for all layers."""
    frozen_stages: int = 0
    """Freeze the patch embedding and the first N stages (of a DeiT: blocks); 0: train everything."""
    weight_decay: float = 0.05
    """Weight decay of all parameters except vectors, biases and those that the model exempts."""
    no_decay: tuple[str, ...] = ()
    """Names of further parameters without weight decay; wildcards are allowed, as in "*relative_positions*"."""
    clip_norm: float | None = 5.0
    """Largest gradient norm; None: no clipping by norm."""
    clip_value: float | None = None
    """Largest absolute value of each entry of the gradient, instead of clip_norm; None: no clipping by value."""
    ema_decay: float | None = None
    """Decay of an exponential moving average (EMA) of the weights, which is evaluated and shipped; None: no EMA."""
    precision: str = "fp32"
    """fp32, bf16, fp16 (on GPUs), or fp64."""
    compile: bool = False
    """Compile the model with torch.compile."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    deterministic: bool = False
    """Use bit-for-bit reproducible algorithms on GPUs, at some cost; those on CPUs always are."""
    seed: int = 0
    """Random seed."""
    num_workers: int = 4
    """Data workers per training process; results do not depend on it. Default of `train`: at most the cores per process."""
    eval_every: int = 1
    """Epochs between evaluations; there is always one at the end."""
    eval_every_steps: int | None = None
    """Updates between evaluations, instead of eval_every."""
    save_every: int | None = None
    """Updates between checkpoints; None: one per epoch. There is always one at the end and after a signal."""
    save_every_epochs: int | None = None
    """Epochs between checkpoints, instead of save_every."""
    keep: int = 3
    """Number of checkpoints to keep."""
    ship: str = "last"
    """Weights to test and ship at the end: last, or best (those of the best evaluation)."""
    best_from: float = 0.0
    """Share of the updates before which no best weights are kept, although an evaluation there can be the best."""
    log_every: int = 50
    """Updates between lines of the journal; there is also one at the end of each epoch."""
    log_every_epochs: int | None = None
    """Epochs between lines of the journal, instead of log_every; there is always one at the end."""

    def problems(self) -> list[str]:
        """All problems with the settings, one line each."""
        found = [*self._wrong_counts(), *self._wrong_rates(), *self._wrong_clipping(), *self._wrong_schedule()]
        for name, allowed in (("precision", PRECISIONS), ("ship", SHIPPED)):
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if not found:
            found += self._wrong_times()
        if not found and self.batch_size % self.accumulation:
            found.append(f"batch_size is {self.batch_size}, which is not a multiple of accumulation, {self.accumulation}")
        return found

    def _wrong_counts(self) -> list[str]:
        least = {"epochs": 1, "cooldown_epochs": 0, "warmup_epochs": 0, "batch_size": 1, "accumulation": 1, "lr_images": 0}
        least |= {"seed": 0, "num_workers": 0, "eval_every": 1, "save_every": 1, "keep": 3, "log_every": 1}
        least |= {"steps": 1, "warmup_steps": 0, "eval_every_steps": 1, "save_every_epochs": 1, "log_every_epochs": 1}
        least |= {"frozen_stages": 0}
        values = {name: getattr(self, name) for name in least}
        found = [
            f"{name} is {value}; give an integer ≥ {least[name]}{' and ≤ 2^40' if value > MAX_COUNT else ''}"
            for name, value in values.items()
            if value is not None and not least[name] <= value <= MAX_COUNT and not (name == "seed" and value > MAX_COUNT)
        ]
        found += [f"seed is {self.seed}; give an integer < 2^63"] * (self.seed >= 2**63)
        return found + [f"num_workers is {self.num_workers}; give at most {MAX_WORKERS}"] * (self.num_workers > MAX_WORKERS)

    def _wrong_rates(self) -> list[str]:
        found = []
        for name in ("lr", "warmup_lr", "min_lr", "weight_decay"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_RATE or (name == "lr" and value == 0):
                least = "> 0" if name == "lr" else "≥ 0"
                found.append(f"{name} is {value}; give a number {least} and ≤ {MAX_RATE:g}")
        if not found and max(self.warmup_lr, self.min_lr) > self.lr:
            found.append(f"lr is {self.lr:g}; it must not be below warmup_lr, {self.warmup_lr:g}, or min_lr, {self.min_lr:g}")
        if self.optimizer_eps is not None and not 0 < self.optimizer_eps <= 1:
            found.append(f"optimizer_eps is {self.optimizer_eps}; give a number in (0, 1], or None")
        if not 0 <= self.best_from < 1:
            found.append(f"best_from is {self.best_from}; give a number in [0, 1)")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            found.append(f"layer_decay is {self.layer_decay}; give a number in (0, 1], or None")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            found.append(f"ema_decay is {self.ema_decay}; give a number in (0, 1), or None")
        return found

    def _wrong_clipping(self) -> list[str]:
        limits = {"clip_norm": self.clip_norm, "clip_value": self.clip_value}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        wrong = {name: limit for name, limit in given.items() if not (isfinite(limit) and limit > 0)}
        found = [f"{name} is {limit}; give a number > 0, or None" for name, limit in wrong.items()]
        if len(given) == 2:
            found.append(
                f"clip_norm is {self.clip_norm:g} and clip_value is {self.clip_value:g}, but only one of them can be used; "
                "to clip by value pass --clip-norm None, to clip by norm --clip-value None"
            )
        return found

    def _wrong_schedule(self) -> list[str]:
        found = []
        for name, allowed in (("schedule", SCHEDULES), ("anneal", ANNEALINGS)):
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if not (isfinite(self.poly_power) and self.poly_power > 0):
            found.append(f"poly_power is {self.poly_power}; give a number > 0")
        if not 0 < self.lr_decay <= 1:
            found.append(f"lr_decay is {self.lr_decay}; give a number in (0, 1]")
        return found + self._wrong_momentum() + self._wrong_milestones()

    def _wrong_momentum(self) -> list[str]:
        if self.momentum_cycle is None:
            return []
        ends, peak = self.momentum_cycle
        if not (0 <= ends < 1 and 0 <= peak < 1):
            return [f"momentum_cycle is {ends:g} and {peak:g}; give two numbers in [0, 1), or None"]
        if self.schedule != "one-cycle":
            return [f"momentum_cycle is for schedule one-cycle, but schedule is {self.schedule!r}; change one of the two"]
        return []

    def _wrong_milestones(self) -> list[str]:
        given, multi_step = self.milestones, self.schedule == "multi-step"
        if bool(given) != multi_step:
            hint = "give some with --milestones" if multi_step else "only multi-step uses them; change one of the two"
            return [f"schedule is {self.schedule!r} and milestones is {given or 'empty'}; {hint}"]
        unit, end = ("epochs", self.epochs) if self.steps is None else ("steps", self.steps)
        if any(not before < after for before, after in pairwise((0, *given, end))) and given:
            return [f"milestones is {given}; give increasing numbers of {unit}, > 0 and < {end}, where the schedule ends"]
        return []

    def _wrong_times(self) -> list[str]:
        """Contradictions that do not depend on the data; `Timeline.problems` returns those that do."""
        found = []
        if self.steps is None and self.warmup_steps is None and self.warmup_epochs > self.epochs:
            found.append(f"warmup_epochs is {self.warmup_epochs}, but there are only {self.epochs} epochs")
        if self.steps is not None and self.warmup_steps is not None and self.warmup_steps > self.steps:
            found.append(f"warmup_steps is {self.warmup_steps}, but there are only {self.steps} steps; give no more than that")
        if self.save_every is not None and self.save_every_epochs is not None:
            found.append(
                f"save_every is {self.save_every} updates and save_every_epochs is {self.save_every_epochs} epochs; give one: "
                "to save by epochs pass --save-every None"
            )
        return found

    @property
    def num_epochs(self) -> int | None:
        """Epochs of the whole training run; None if `steps` sets its length."""
        return self.epochs + self.cooldown_epochs if self.steps is None else None

    def scaled(self, rate: float) -> float:
        """A learning rate scaled to the batch size."""
        return rate * self.batch_size / self.lr_images if self.lr_images else rate
