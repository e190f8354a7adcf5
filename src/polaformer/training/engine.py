"""A model in training with its optimiser, schedule and EMA: makes one update at a time, saves and restores the whole state."""

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
from polaformer.training.evaluation import count, to_model
from polaformer.training.freezing import freeze
from polaformer.training.job import Objective
from polaformer.training.optim import Schedule, create_optimizer, optimizer_state, restore_optimizer_state
from polaformer.training.processes import sum_over_processes, use_deterministic_algorithms
from polaformer.training.settings import Settings


@dataclass
class Progress:
    """How far a training run is; with the weights, all that a resumed run needs to know."""

    step: int = 0
    evaluated: int = 0  # the step of the last evaluation; 0 if there was none
    loss: float = 0.0  # sum over the updates since the last line of the journal
    updates: int = 0  # number of updates in that sum
    journal: int = 0  # size in bytes
    bad: list[str] = field(default_factory=list)  # one line per sample of this epoch that could not be used
    best: float | None = None  # the best value of the metric so far, if the best weights are kept
    best_step: int = 0  # the step of that evaluation


class Update(NamedTuple):
    """The result of an update."""

    loss: float  # the mean over all processes
    grad_norm: float
    lr: float
    stop: bool  # whether any process was asked to stop


class NonFiniteError(ArithmeticError):
    """The loss or gradient is not finite; nothing was updated. `is_local`: whether this process's batch may be the cause."""

    def __init__(self, loss: float, grad_norm: float, lr: float, is_local: bool) -> None:
        super().__init__(f"the loss is {loss:g} and the gradient norm {grad_norm:g}")
        self.loss, self.grad_norm, self.lr, self.is_local = loss, grad_norm, lr, is_local


class Engine:
    """Everything that an update changes: model, optimiser, EMA and gradient scaler."""

    def __init__(
        self, model: nn.Module, objective: Objective, settings: Settings, steps_per_epoch: int, accelerator: Accelerator
    ) -> None:
        self.objective, self.settings, self.accelerator = objective, settings, accelerator
        self.best: dict[str, Tensor] | None = None  # weights of the best evaluation so far, if they are kept
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
        """The model that is evaluated and shipped: the EMA, if there is one."""
        return self.inner if self.ema is None else self.ema.module

    def keep_best(self) -> None:
        """Keeps a copy of the weights that were evaluated."""
        self.best = {name: tensor.cpu().clone() for name, tensor in _state_dict(self.evaluated_model).items()}

    def load_best(self) -> None:
        """Loads the best weights into the evaluated model; training cannot continue afterwards."""
        if self.best is not None:
            unwrapped(self.evaluated_model).load_state_dict(self.best)

    def update(self, parts: Sequence[Batch], step: int, *, stop: bool = False) -> Update:
        """Makes one optimiser step; raises NonFiniteError, in all processes, before anything has changed."""
        self._warm_up(parts[-1])
        reseed(derive("step", self.settings.seed, step, self.accelerator.process_index))
        lr = self.schedule.set(step)
        self.train_mode()
        local_loss = sum(self._backward(part, last=part is parts[-1]) for part in parts) / len(parts)
        self.accelerator.unscale_gradients(self.optimizer)
        grad_norm = float(self._clip())
        shared = torch.tensor([local_loss, not isfinite(local_loss), stop], dtype=torch.float64)
        loss, num_broken, num_stopping = sum_over_processes(self.accelerator, shared).tolist()
        loss /= self.accelerator.num_processes
        # With fp16, the scaler skips updates whose gradients are not finite, and continues with a smaller scale.
        if num_broken or not (isfinite(grad_norm) or self._scaler_can_help()):
            self.optimizer.zero_grad()
            raise NonFiniteError(loss, grad_norm, lr, is_local=not isfinite(local_loss) or not num_broken)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.inner, step=step)
        return Update(loss, grad_norm, lr, num_stopping > 0)

    def train_mode(self) -> None:
        """Puts the model into training mode, except for its frozen modules."""
        self.model.train()
        for module in self.frozen:
            module.eval()

    def _scaler_can_help(self) -> bool:
        """Whether a smaller fp16 loss scale may make the gradient finite again."""
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.get_scale() >= 1

    def _warm_up(self, part: Batch) -> None:
        """Makes a throwaway backward pass, once, if there are several processes.

        DistributedDataParallel reassigns gradients to buckets after its first backward pass, and then sums them in another
        order: without this pass, the first update of a resumed run would not be bit-identical to that of an uninterrupted one.
        """
        if not self._is_warm:
            self.train_mode()
            before = [buffer.clone() for buffer in self.inner.buffers()]  # batch norm updates its statistics
            self.accelerator.backward(0.0 * self.objective.loss(self.model, to_model(part, self.inner, self.accelerator)))
            for buffer, value in zip(self.inner.buffers(), before, strict=True):
                buffer.copy_(value)
            self.optimizer.zero_grad()
            self._is_warm = True

    def _backward(self, part: Batch, *, last: bool) -> float:
        """Adds the gradients of a part to the others' and returns its loss; the last part syncs them across processes."""
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            with self.accelerator.autocast():
                loss = self.objective.loss(self.model, to_model(part, self.inner, self.accelerator))
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
        """The counts of the evaluated model, on the batches of all processes."""
        if self.accelerator.num_processes > 1:
            # Of batch norm: each process has its own, and those of the first are shipped.
            for buffer in self.evaluated_model.buffers():
                torch.distributed.broadcast(buffer, 0)
        return count(self.evaluated_model, self.objective, batches, self.accelerator)

    def files(self, progress: Progress, metadata: dict[str, str], *, seconds: float) -> dict[str, bytes]:
        """Everything that a resumed run needs, as the files of a checkpoint."""
        scaler = self.accelerator.scaler
        tensors, numbers = optimizer_state(self.raw_optimizer, self.inner)
        state = {
            "progress": asdict(progress),
            "processes": self.accelerator.num_processes,
            "optimizer": numbers,
            "wall": {"seconds": seconds},
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        files = {
            "state.json": (json.dumps(state, indent=1, sort_keys=True) + "\n").encode(),
            "model.safetensors": save(_state_dict(self.inner), metadata),
            "optimizer.safetensors": save(tensors),
        }
        if self.ema is not None:
            files["ema.safetensors"] = save(_state_dict(self.ema.module), metadata)
        if self.best is not None:
            files["best.safetensors"] = save(self.best, metadata)
        return files

    def restore(self, files: dict[str, bytes]) -> tuple[Progress, dict[str, Any]]:
        """Restores everything from the files of a checkpoint; returns the progress, and the seconds and processes until then.

        Raises DamagedError if the files are not from this training run.
        """
        try:
            state = json.loads(files["state.json"])
            self.inner.load_state_dict(load(files["model.safetensors"]))
            restore_optimizer_state(self.raw_optimizer, self.inner, load(files["optimizer.safetensors"]), state["optimizer"])
            if self.ema is not None:
                self.ema.module.load_state_dict(load(files["ema.safetensors"]))
            self.best = load(files["best.safetensors"]) if "best.safetensors" in files else None
            if self.accelerator.scaler is not None and state["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            about = {"seconds": float(state["wall"]["seconds"]), "processes": int(state["processes"])}
            return Progress(**state["progress"]), about
        except (KeyError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise DamagedError(f"the checkpoint is not from this training run: {error}; start a new run") from error


def _state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in unwrapped(model).state_dict().items()}


def take_batches(batches: Iterator[Batch], number: int) -> list[Batch]:
    """The next batches: the parts of one update."""
    return [next(batches) for _ in range(number)]
