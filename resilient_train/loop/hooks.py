"""What the guard does with each update besides its story, and what takes the place of its parts in a trainer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resilient_train.core.clip import Clipper, clip, gradients, scale
from resilient_train.core.protocols import Effect, Hook
from resilient_train.core.randomness import Seeds, capture, restore
from resilient_train.core.ring import Ring
from resilient_train.core.state import RunState
from resilient_train.data.samples import Samples
from resilient_train.data.trees import nbytes
from resilient_train.durable.progress import Progress
from resilient_train.ground.errors import TrainError
from resilient_train.ground.wording import counted
from resilient_train.parts.run import Run

_MOST_STATES = 2_000  # of generators, 8 KiB each: updates that are older draw other numbers when they are repeated


class NotePlace(Hook):
    """Notes which samples are in use: if the process dies, they may be to blame."""

    def __init__(self, parts: Run, progress: Progress) -> None:
        self._clock, self._samples, self._progress = parts.clock, parts.samples, progress

    def before_update(self) -> None:
        start = self._samples.next_start  # before they are fetched: a data set may hang
        self._progress.updating(self._clock.tick + 1, self._clock.step, start, start + self._samples.slicing.samples)


def snapshots_in_words(ring: Ring, state: RunState) -> str:
    if not ring.every:
        return "no snapshots in memory (memory.every=0): this run cannot rewind"
    size, allowed = ring.settle_slots(nbytes(state.live()))
    room = f"{size / 2**20:,.1f} MiB each, of {allowed / 2**20:,.1f} MiB allowed"
    if not ring.slots:
        return f"no snapshots in memory: this run cannot rewind; two are needed ({room})"
    return f"keeps {ring.slots} snapshots to rewind to, every {counted(ring.every, 'step')} ({room})"


class DirectStepCheck:
    """Notices an optimizer step of the loop's own, which would pass the gate."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.running: str | None = None  # "loop" or "guard"
        self._before: str | None = None
        _watch_steps()
        for optimizer in optimizers:
            _step_checks[optimizer] = self  # in the place of that of an earlier guard

    def __enter__(self) -> None:
        self._before, self.running = self.running, "guard"

    def __exit__(self, *_: object) -> None:
        self.running = self._before


_step_checks = WeakKeyDictionary[Optimizer, DirectStepCheck]()


def _check_step(optimizer: Optimizer, *_: Any) -> None:
    if (known := _step_checks.get(optimizer)) is not None and known.running == "loop":
        raise TrainError(
            "the loop stepped an optimizer itself, past the gate: remove optimizer.step(), "
            "guard.step and guard.update do it"
        )


@functools.cache
def _watch_steps() -> None:
    """Add one hook for all optimizers of the process: those that have hooks of their own wait in the gate."""
    register_optimizer_step_pre_hook(_check_step)


class TrainersClipper(Clipper):
    """Takes the norm that a trainer has measured, which has clipped the gradients already."""

    norm: torch.Tensor | None = None  # of the newest gradients, before they were clipped; None if it was not measured

    def _clipped(self, weights: Sequence[torch.Tensor], max_norm: float | None, factor: float) -> torch.Tensor:
        norm = after = clip(weights, over_ranks=self.over_ranks)
        if self.norm is not None:  # callbacks may have spoiled them since
            norm = torch.where(after.isfinite(), self.norm, after)
        clipped_to = self.config.max_norm
        if max_norm is not None and max_norm != clipped_to:  # a remedy clips further
            clipped = norm if clipped_to is None else norm.clamp(max=clipped_to)
            scale(gradients(weights), (max_norm / (clipped + 1e-6)).clamp_(max=1.0))
        return norm


class RecordedStates(Seeds):
    """Leaves the generators to a trainer, and restores the states that it had before an update if that is repeated."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, 0, device)
        self._states: dict[int, dict[str, Any]] = {}  # by the position of an update
        self.start = self.times = 0  # of the newest update, and how many were prepared

    def for_update(self, start: int) -> None:
        self.start, self.times = start, self.times + 1
        if start in self._states:
            restore(self._states[start], self._device)
        else:
            self._states[start] = capture(self._device)
            if len(self._states) > _MOST_STATES:
                del self._states[next(iter(self._states))]

    def between(self, position: int) -> None:
        pass


def skipped_samples(samples: Samples) -> Effect:
    skipped = samples.skipped

    def restore(state: Any) -> None:
        samples.skip_only(state)

    def undo(state: Any) -> None:
        if samples.rows and state != skipped:
            samples.skip_only(state)

    return Effect("skipped", lambda: list(skipped), restore, undo, lambda: list(skipped))
