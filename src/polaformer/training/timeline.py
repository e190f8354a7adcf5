"""When a training run logs, evaluates, saves and ends, counted in updates. Needs no PyTorch."""

from dataclasses import dataclass

from polaformer.training.settings import Settings


@dataclass(frozen=True)
class Timeline:
    """The intervals of the settings in updates, given the number of updates per epoch.

    `step` is the number of updates made so far, at least 1.
    """

    settings: Settings
    steps_per_epoch: int

    @property
    def schedule_steps(self) -> int:
        """Updates of the schedule, warm-up included."""
        given = self.settings.steps
        return self.settings.epochs * self.steps_per_epoch if given is None else given

    @property
    def warmup_steps(self) -> int:
        """Updates in which the learning rate rises."""
        given = self.settings.warmup_steps
        return self.settings.warmup_epochs * self.steps_per_epoch if given is None else given

    @property
    def total(self) -> int:
        """Updates of the whole training run: schedule and cooldown."""
        return self.schedule_steps + self._cooldown_steps

    @property
    def _cooldown_steps(self) -> int:
        return self.settings.cooldown_epochs * self.steps_per_epoch

    @property
    def milestones(self) -> tuple[int, ...]:
        """The updates before which a multi-step schedule lowers the learning rate."""
        unit = self.steps_per_epoch if self.settings.steps is None else 1
        return tuple(milestone * unit for milestone in self.settings.milestones)

    def ends_epoch(self, step: int) -> bool:
        """Whether update `step` was the last of an epoch or of the run, which may end within an epoch."""
        return step % self.steps_per_epoch == 0 or step == self.total

    def logs_after(self, step: int) -> bool:
        """Whether the journal gets a line after update `step`."""
        epochs = self.settings.log_every_epochs
        if epochs is None:
            return step % self.settings.log_every == 0 or self.ends_epoch(step)
        return self._is_due(step, epochs * self.steps_per_epoch)

    def evaluates_after(self, step: int) -> bool:
        """Whether the model is evaluated after update `step`."""
        steps = self.settings.eval_every_steps
        return self._is_due(step, self.settings.eval_every * self.steps_per_epoch if steps is None else steps)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is written after update `step`."""
        epochs = self.settings.save_every_epochs or 1
        return self._is_due(step, self.settings.save_every or epochs * self.steps_per_epoch)

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.total

    def problems(self) -> list[str]:
        """Problems of the settings with this data, one line each; `Settings.problems` returns those of any data."""
        settings, end, found = self.settings, self.schedule_steps, []
        if self.warmup_steps > end:
            given = (
                f"warmup_epochs is {settings.warmup_epochs}, which is {self.warmup_steps} updates with this data,"
                if settings.warmup_steps is None
                else f"warmup_steps is {settings.warmup_steps},"
            )
            found.append(f"{given} but the schedule has only {end}; give --warmup-steps ≤ {end}, or a longer schedule")
        # A schedule in epochs may have any cooldown.
        if settings.steps is not None and self._cooldown_steps > end:
            found.append(
                f"cooldown_epochs is {settings.cooldown_epochs}, which is {self._cooldown_steps} updates with this data, more "
                f"than the {end} of the schedule; give fewer, or more --steps"
            )
        return found
