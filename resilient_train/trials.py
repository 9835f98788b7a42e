"""Trials: several remedies are tried from the same state on the same samples, and those that work best are applied.

Whatever a trial changes is put back: the state, bit for bit, and what remedies turn. It writes nothing, and its updates
are no ticks. Every rank makes the same updates, and judges them by losses that are averaged over the ranks.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from resilient_train import numerics
from resilient_train.computation import Computation, StartedUpdate, is_out_of_memory
from resilient_train.errors import StorageFailed, TrainError, in_one_line
from resilient_train.recover.knobs import Knobs
from resilient_train.recover.remedies import RunControl, remedy
from resilient_train.recover.trials import JUDGED, Arm, cost_of
from resilient_train.run_parts import RunParts
from resilient_train.state.copies import Backups
from resilient_train.state.randomness import Seeds
from resilient_train.state.ring import Snapshot
from resilient_train.types import Action
from resilient_train.update.gate import Flag
from resilient_train.update.objective import Measured, scalar
from resilient_train.update.turns import DirectStepCheck
from resilient_train.watch.vitals import mean
from resilient_train.wording import log

_FAILED, _ENDS = 1, 2  # what ranks tell each other: this arm failed, or the trial has to end
NO_LIMITS = torch.finfo(torch.float32).max, torch.finfo(torch.float32).max


class TrialStopped(Exception):
    """A trial cannot take place, or not be completed: then nothing has happened."""


class TrialControl(RunControl, Protocol):
    """What a trial needs besides: remedies that can be taken back."""

    knobs: Knobs

    def tentatively(self) -> Any:
        """Take back, at the end of a block, what remedies change in it, except for the state."""


@dataclass(frozen=True)
class Loop:
    """How training makes an update: what the training loop does with a batch, without the loop."""

    model: nn.Module  # as the training calls it
    bare: nn.Module  # without the wrappers of other processes
    objective: Measured | None  # None: the loop hands over its losses
    backward: Callable[[torch.Tensor], None]
    direct_steps: DirectStepCheck
    backups: Backups
    seeds: Seeds
    stop: Callable[[], bool]  # the run was asked to stop


class Trials:
    """Tries remedies in a run whose updates can be made without its loop."""

    def __init__(self, parts: RunParts, loop: Loop, planned: Callable[[], int | None]) -> None:
        """`planned` returns the steps that the run plans, if that is known."""
        self._parts, self._loop, self.planned = parts, loop, planned
        self._computation: Computation | None = None
        if parts.world.size > 1 and loop.objective is not None:
            self._computation = Computation(parts, loop.model, loop.objective, loop.backward, treats=True)

    @classmethod
    def of(cls, parts: RunParts, loop: Loop, planned: Callable[[], int | None]) -> Trials | None:
        """Return None where updates cannot be made without the loop, or their samples not be found again."""
        is_possible = loop.objective is not None and parts.samples.rows and not parts.samples.is_fed
        return cls(parts, loop, planned) if is_possible else None

    @contextmanager
    def course(self, skipped: int, rows: Sequence[int], *, lifts_limits: bool = False) -> Iterator[Course]:
        """Prepare a trial. Its arms pass at most so many `skipped` samples, and are not judged on bad `rows`.

        `lifts_limits`: the limits of the gate were learned on the way that the trial leaves.
        """
        updater = self._parts.updater
        gate, restarts = updater.gate, copy.deepcopy(updater.restarts)
        limits, attributes = gate.limits, self._loop.backups.attributes()
        if not self._parts.ring.has_room_aside():
            log.info("note: no trial: a further copy of the state exceeds the memory that snapshots may take")
            raise TrialStopped
        with self._parts.ring.aside() as go_back, self._loop.direct_steps.running("guard"):
            if lifts_limits:
                gate.limit(*NO_LIMITS)
            try:
                yield Course(self._parts, self._loop, self._computation, go_back, skipped, rows)
            finally:
                gate.limit(*limits)
                updater.restarts = restarts
                self._loop.backups.set_attributes(attributes)


class Course:
    """One trial: the arms, each from the same state."""

    def __init__(
        self,
        parts: RunParts,
        loop: Loop,
        computation: Computation | None,
        go_back: Callable[[Snapshot | None], None],
        skipped: int,
        rows: Sequence[int],
    ) -> None:
        self._parts, self._loop, self._computation, self._go_back = parts, loop, computation, go_back
        self._skipped, self._rows = skipped, rows
        self._attributes = loop.backups.attributes()
        self._judged: list[tuple[int, list[Any]]] = []  # start and batches of the later updates
        self._updates = self._forwards = 0  # updates made so far, and forwards of updates that are judged

    @property
    def cost(self) -> int:
        """What it has cost so far, in updates."""
        return cost_of(self._updates, self._forwards)

    def reproduces(self, loss: float, since: Snapshot, knobs: Knobs) -> bool:
        """Say whether the update after a snapshot has the very `loss` again that it had in training.

        If not, the program keeps state outside of the run, which a trial changes and cannot put back.
        """
        parts = self._parts
        self._go_back(since)
        try:
            _, again = self._computed(knobs, self._loop.backups.take())
        except Exception as error:
            if isinstance(error, TrainError) or parts.world.size > 1:
                raise
            return False
        finally:
            parts.updater.drop_gradients()
            self._updates += 1
            self._go_back(None)
        if parts.world.size == 1:
            return float(again) == loss
        return math.isclose(float(parts.world.mean(again)), loss, rel_tol=1e-6)  # summed up in another order

    def run(
        self, actions: Sequence[Action], control: TrialControl, steps: int, *, since: Snapshot | None = None
    ) -> Arm:
        """Make `steps` updates with some remedies, from the state at hand, or from that of a snapshot."""
        parts = self._parts
        if not self._judged:
            self._fetch_judged(control)
        self._go_back(since)
        self._loop.backups.set_attributes(self._attributes)
        with control.tentatively():
            for action in actions:
                remedy(action).apply(control)
            try:
                anomalies = sum(not self._update(control.knobs) for _ in range(steps))
                losses = self._losses()
            except Exception as error:  # of the program, which a remedy or the weights it led to may cause
                is_fetch = isinstance(error, StorageFailed)
                if (isinstance(error, TrialStopped | TrainError) and not is_fetch) or parts.world.size > 1:
                    raise
                if is_fetch or is_out_of_memory(error):
                    log.info("note: a trial ended without effect: %s", in_one_line(error))
                    raise TrialStopped from error
                log.info("note: an arm of a trial failed: %s", in_one_line(error))
                anomalies, losses = steps, (math.inf,) * len(self._judged)
        return Arm(tuple(actions), anomalies, losses)

    def _fetch_judged(self, control: TrialControl) -> None:
        """Fetch the samples that all arms are judged on: later than all that any of them is trained on.

        Updates with rows that cannot be fetched are left out.
        """
        samples = self._parts.samples
        each = samples.slicing.samples
        with control.tentatively():
            samples.quarantine(self._rows)
            after = max(samples.next_start, samples.position) + self._skipped + each
            starts = samples.starts(after, (JUDGED + 1) * each)[:JUDGED]
            fetched: list[list[Any] | None] = []
            for start in starts:
                try:
                    fetched.append([samples.collated(keys) for keys in samples.keys_at(start)])
                except Exception:
                    fetched.append(None)
        on_all = [
            all(each) for each in zip(*self._parts.world.all_of([one is not None for one in fetched]), strict=True)
        ]
        found = zip(starts, fetched, on_all, strict=True)
        self._judged = [(start, batches) for start, batches, is_there in found if is_there and batches is not None]
        if len(self._judged) < JUDGED // 2:
            log.info("note: no trial: too many of the later rows that would judge it cannot be fetched")
            raise TrialStopped

    def _computed(self, knobs: Knobs, backup: Any) -> tuple[bool, torch.Tensor]:
        """Run forward and backward of the next update as training runs them.

        Returns whether something raised, of which the other ranks learn by a loss of NaN, and the loss.
        """
        parts, loop, losses = self._parts, self._loop, []
        assert loop.objective is not None
        parts.precision.set(higher=knobs.values.higher_precision)
        numerics.raise_eps(knobs.values.eps)
        update = parts.samples.next_update(parts.beat)
        begun = StartedUpdate(update, parts.clock.tick + 1, parts.clock.step + 1, backup, [], time.monotonic())
        loop.seeds.for_update(update.start)
        for batch in update.batches:
            begun.inputs.append(batch)
            if self._computation is None:
                loss, _ = loop.objective.for_training(loop.model, parts.world.on_device(batch))
                loop.backward(loss)
            else:
                computed = self._computation.of(parts.world.on_device(batch), begun, None, lambda made: made)
                if isinstance(computed, str):
                    raise torch.OutOfMemoryError(computed)
                loss = computed[0]
            losses.append(scalar(loss))
        return bool(update.failed or begun.raised), losses[0] if len(losses) < 2 else mean(losses)

    def _update(self, knobs: Knobs) -> bool:
        """Make one update as training makes it; say whether it landed."""
        parts, loop, values = self._parts, self._loop, knobs.values
        updater, world = parts.updater, parts.world
        if loop.stop():
            updater.agreement.set_flag(Flag.STOP)
        backup = loop.backups.take()
        has_raised, loss = self._computed(knobs, backup)
        parts.ring.before_change()
        attempt = updater.apply(parts.clock.step, torch.full_like(loss, math.nan) if has_raised else loss, values)
        reduced, norm, *rest = attempt.numbers or attempt.measured.tolist()
        is_asked = loop.stop() if world.size == 1 else rest[int(updater.scaler is not None)] > 0
        if is_asked:
            raise TrialStopped
        if is_landed := updater.gate.admits(reduced, norm):
            parts.clock.step += 1
            updater.accept(parts.clock.step)
            knobs.advance(was_limited=attempt.is_limited)
        else:
            updater.undo(attempt)
            loop.backups.put_back(backup, with_scale=False)
        loop.backups.let_go(backup)
        self._updates += 1
        parts.beat()
        # A loss scale that is too high is found out by an overflow.
        return is_landed or (updater.scaler is not None and math.isfinite(reduced))

    def _losses(self) -> tuple[float, ...]:
        """Measure the losses of the later updates, without training on them; averaged over the ranks.

        Each micro-batch frees its graph before the next, as in training. An objective may need one: it differentiates.
        """
        parts, loop, losses = self._parts, self._loop, []
        assert loop.objective is not None
        for start, batches in self._judged:
            made, trouble = [], 0
            try:
                loop.seeds.for_update(start)
                for batch in batches:
                    loss, _ = loop.objective(loop.bare, parts.world.on_device(batch))
                    if parts.state.is_sharded:  # only a backward makes every rank drop the weights of the others again
                        loop.backward(loss)
                        parts.updater.drop_gradients()
                    made.append(loss.detach().float())
                    del loss
            except Exception as error:
                if parts.world.size == 1 or parts.state.is_sharded:  # there other ranks are inside of this forward
                    raise
                trouble = _ENDS if is_out_of_memory(error) else _FAILED
                log.info("note: an arm of a trial failed: %s", in_one_line(error))
            self._forwards += 1
            parts.beat()
            if (agreed := -parts.world.least(-float(_ENDS if loop.stop() else trouble))) >= _ENDS:
                raise TrialStopped
            losses.append(torch.full((), math.inf, device=parts.world.device) if agreed else mean(made))
        return tuple(parts.world.mean(torch.stack(losses)).tolist())
