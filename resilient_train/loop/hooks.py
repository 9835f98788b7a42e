"""What the guard does with each update besides its story, and what takes the place of its parts in a trainer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from resilient_train.core.clip import Clipper, clip, gradients, scale
from resilient_train.core.protocols import Effect, Hook
from resilient_train.core.randomness import Seeds, capture, restore
from resilient_train.core.ring import Ring
from resilient_train.core.state import RunState
from resilient_train.core.transaction import Transaction
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
        self._noted = 0, 0

    def before_update(self) -> None:
        start = self._samples.next_start  # before they are fetched: a data set may hang
        self._note(start, start + self._samples.slicing.samples)

    @contextmanager
    def around_compute(self, update: Transaction) -> Iterator[None]:
        start, stop = update.update.start, update.update.stop
        if (start, stop) != self._noted:  # samples before them are left out
            self._note(start, stop)
        yield

    def _note(self, start: int, stop: int) -> None:
        self._noted = start, stop
        self._progress.updating(self._clock.tick + 1, self._clock.step, start, stop)


def snapshots_in_words(ring: Ring, state: RunState) -> str:
    if not ring.every:
        return "no snapshots in memory (memory.every=0): this run cannot rewind"
    size, allowed = ring.settle_slots(nbytes(state.live()))
    mib = f"{max(ring.slots, 2) * size / 2**20:,.1f} MiB"
    why = "half of what was available" if ring.config.max_gib is None else "memory.max_gib"
    limit = f", of {allowed / 2**20:,.1f} MiB allowed: {why}" if ring.slots < ring.config.keep else ""
    if not ring.slots:
        return f"no snapshots in memory: this run cannot rewind; two take {mib}{limit}"
    return f"keeps {ring.slots} snapshots to rewind to, every {counted(ring.every, 'step')} ({mib}{limit})"


class DirectStepCheck:
    """Notices an optimizer step of the loop's own, which would pass the gate."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.running: Literal["loop", "guard"] | None = None
        self._before: Literal["loop", "guard"] | None = None
        for optimizer in optimizers:
            optimizer.step = self._watched(optimizer, optimizer.step)  # type: ignore[method-assign]

    def __enter__(self) -> None:
        self._before, self.running = self.running, "guard"

    def __exit__(self, *_: object) -> None:
        self.running = self._before

    def _watched(self, optimizer: Any, step: Any) -> Any:
        plain = getattr(step, "plain", step)  # without the wrapper of an earlier guard

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.running == "loop":
                raise TrainError(
                    "the loop stepped an optimizer itself, past the gate: remove optimizer.step(), "
                    "guard.step and guard.update do it"
                )
            optimizer._opt_called = True
            return plain(*args, **kwargs)

        watched.plain = plain  # type: ignore[attr-defined]
        # A scheduler of torch's that is made later would wrap a step of its class, to set that mark, and fails on this.
        watched._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return watched


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
    def restore(state: Any) -> None:
        for start, stop in state:
            samples.skip(int(start), int(stop))

    def undo(state: Any) -> None:
        if samples.rows and state != samples.skipped.added:
            samples.skip_only(state)

    skipped = samples.skipped
    return Effect("skipped", lambda: list(skipped.added), restore, undo, lambda: skipped.spans)
