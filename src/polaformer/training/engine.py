"""A model under training: its optimiser, schedule and average, one update at a time, and all of it as bytes and back."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load, save
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from polaformer.backbones.loading import unwrapped
from polaformer.data.batch import Batch
from polaformer.data.randomness import derive, reseed
from polaformer.training.checkpoint import DamagedError
from polaformer.training.evaluation import count, moved
from polaformer.training.freezing import freeze
from polaformer.training.job import Objective
from polaformer.training.optim import Schedule, create_optimizer, restore_state, state_of
from polaformer.training.processes import sum_over, use_deterministic_algorithms
from polaformer.training.settings import Settings


@dataclass
class Progress:
    """How far a training is; with the weights, all that a resumed run needs to know."""

    step: int = 0
    evaluated: int = 0  # the step of the last evaluation; 0 if there was none
    loss: float = 0.0  # summed since the last line of the journal
    updates: int = 0  # that it was summed over
    journal: int = 0  # bytes
    bad: list[str] = field(default_factory=list)  # lines on samples of this epoch that could not be used
    best: float | None = None  # the best value of the metric so far, where the best weights are kept
    best_step: int = 0  # the step of that evaluation


class Update(NamedTuple):
    """What came of an update."""

    loss: float  # the mean over all processes
    grad_norm: float
    lr: float
    stop: bool  # whether a process was asked to stop


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is not finite; nothing was updated. `mine`: whether this process' own loss is not."""

    def __init__(self, loss: float, grad_norm: float, lr: float, mine: bool) -> None:
        super().__init__(f"the loss is {loss:g} and the norm of the gradient {grad_norm:g}")
        self.loss, self.grad_norm, self.lr, self.mine = loss, grad_norm, lr, mine


class Engine:
    """The parts of a training that change with every update."""

    def __init__(
        self, model: nn.Module, objective: Objective, settings: Settings, steps_per_epoch: int, accelerator: Accelerator
    ) -> None:
        self.objective, self.settings, self.accelerator = objective, settings, accelerator
        self.best: dict[str, Tensor] | None = None  # the weights of the best evaluation so far, where they are kept
        if settings.deterministic:
            use_deterministic_algorithms()
        if settings.precision == "fp64":
            model = model.double()
        if settings.grad_checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        self.inner = model.to(accelerator.device)
        self.frozen = freeze(self.inner, settings.frozen_stages)
        self.ema = None if settings.ema_decay is None else ModelEmaV3(self.inner, decay=settings.ema_decay)
        optimizer = create_optimizer(self.inner, settings)
        compiled = torch.compile(self.inner) if settings.compile else self.inner
        self.model, self.optimizer = accelerator.prepare(compiled, optimizer)
        self.raw_optimizer = optimizer
        self.schedule = Schedule(optimizer, settings, steps_per_epoch)
        self._is_warm = accelerator.num_processes == 1

    @property
    def evaluated_model(self) -> nn.Module:
        """What is evaluated and shipped: the average of the weights where there is one."""
        return self.inner if self.ema is None else self.ema.module

    def keep_best(self) -> None:
        """Remembers the weights that were evaluated."""
        self.best = {name: tensor.cpu().clone() for name, tensor in _tensors(self.evaluated_model).items()}

    def take_best(self) -> None:
        """Gives the evaluated model the weights that were remembered; training cannot go on afterwards."""
        if self.best is not None:
            unwrapped(self.evaluated_model).load_state_dict(self.best)

    def update(self, parts: Sequence[Batch], step: int, *, stop: bool = False) -> Update:
        """One step of the optimiser; raises NonFiniteError, in all processes, before anything has changed."""
        self._warm_up(parts[-1])
        reseed(derive("step", self.settings.seed, step, self.accelerator.process_index))
        lr = self.schedule.set(step)
        self.train_mode()
        mine = sum(self._backward(part, last=part is parts[-1]) for part in parts) / len(parts)
        self.accelerator.unscale_gradients(self.optimizer)
        grad_norm = float(self._clip())
        shared = torch.tensor([mine, not isfinite(mine), stop], dtype=torch.float64)
        loss, broken, stopping = sum_over(self.accelerator, shared).tolist()
        loss /= self.accelerator.num_processes
        # The scaler of fp16 skips updates with gradients that are not finite, and carries on with a smaller scale.
        if broken or not (isfinite(grad_norm) or self._scaler_can_help()):
            self.optimizer.zero_grad()
            raise NonFiniteError(loss, grad_norm, lr, not isfinite(mine) or not broken)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.inner, step=step)
        return Update(loss, grad_norm, lr, stopping > 0)

    def train_mode(self) -> None:
        """Puts the model into training mode, but for what is frozen."""
        self.model.train()
        for module in self.frozen:
            module.eval()

    def _scaler_can_help(self) -> bool:
        """Whether a smaller scale of fp16 may make the gradient finite again."""
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.get_scale() >= 1

    def _warm_up(self, part: Batch) -> None:
        """A backward pass for nothing, once in a process that has company.

        DistributedDataParallel sorts gradients into other buckets after its first backward pass, and so adds them up in another
        order from then on: the first update of a resumed run would differ in the last bit from that of an uninterrupted one.
        """
        if not self._is_warm:
            self.train_mode()
            before = [buffer.clone() for buffer in self.inner.buffers()]  # batch norm counts what it sees
            self.accelerator.backward(0.0 * self.objective.loss(self.model, moved(part, self.inner, self.accelerator)))
            for buffer, value in zip(self.inner.buffers(), before, strict=True):
                buffer.copy_(value)
            self.optimizer.zero_grad()
            self._is_warm = True

    def _backward(self, part: Batch, *, last: bool) -> float:
        """Adds a part's gradients to the others; they are summed over processes with the last part."""
        together = nullcontext() if last else self.accelerator.no_sync(self.model)
        with together:
            with self.accelerator.autocast():
                loss = self.objective.loss(self.model, moved(part, self.inner, self.accelerator))
            self.accelerator.backward(loss / self.settings.accumulation)
        return float(loss.detach())

    def _clip(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.inner.parameters() if parameter.grad is not None]
        norm = get_total_norm(gradients, foreach=None)
        if self.settings.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.inner.parameters(), self.settings.clip_norm, norm)
        if self.settings.clip_value is not None:
            nn.utils.clip_grad_value_(self.inner.parameters(), self.settings.clip_value)
        return norm

    def count(self, batches: Iterable[Batch]) -> Any:
        """The counts of the model that is shipped, on the batches of all processes."""
        return count(self.evaluated_model, self.objective, batches, self.accelerator)

    def files(self, progress: Progress, metadata: dict[str, str], *, seconds: float) -> dict[str, bytes]:
        """All that a resumed run needs, as the files of a checkpoint."""
        scaler = self.accelerator.scaler
        memory, numbers = state_of(self.raw_optimizer, self.inner)
        state = {
            "progress": asdict(progress),
            "processes": self.accelerator.num_processes,
            "optimizer": numbers,
            "wall": {"seconds": seconds},
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        found = {
            "state.json": (json.dumps(state, indent=1, sort_keys=True) + "\n").encode(),
            "model.safetensors": save(_tensors(self.inner), metadata),
            "optimizer.safetensors": save(memory),
        }
        if self.ema is not None:
            found["ema.safetensors"] = save(_tensors(self.ema.module), metadata)
        if self.best is not None:
            found["best.safetensors"] = save(self.best, metadata)
        return found

    def restore(self, files: dict[str, bytes]) -> tuple[Progress, dict[str, Any]]:
        """Takes everything from the files of a checkpoint, and says how it was come by (seconds, processes).

        Raises DamagedError where the files are not of this training.
        """
        try:
            state = json.loads(files["state.json"])
            self.inner.load_state_dict(load(files["model.safetensors"]))
            restore_state(self.raw_optimizer, self.inner, load(files["optimizer.safetensors"]), state["optimizer"])
            if self.ema is not None:
                self.ema.module.load_state_dict(load(files["ema.safetensors"]))
            self.best = load(files["best.safetensors"]) if "best.safetensors" in files else None
            if self.accelerator.scaler is not None and state["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            about = {"seconds": float(state["wall"]["seconds"]), "processes": int(state["processes"])}
            return Progress(**state["progress"]), about
        except (KeyError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise DamagedError(f"the checkpoint is not of this training: {error}; start a new one") from error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in unwrapped(model).state_dict().items()}


def taken(parts: Iterator[Batch], number: int) -> list[Batch]:
    """The next parts of an update."""
    return [next(parts) for _ in range(number)]
