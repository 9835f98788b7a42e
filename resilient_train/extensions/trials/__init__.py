"""Trials: lower rates are tried from the same state on the same samples, and the one that works best is applied.

Whatever a trial changes is put back: the state, bit for bit, and the knobs. It writes nothing, and its updates are no
ticks. Every rank makes the same updates, and judges them by losses that are averaged over the ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from resilient_train.core.checks import Check
from resilient_train.core.mark import Mark
from resilient_train.core.protocols import Effect, Hook
from resilient_train.core.ring import Ring, Snapshot
from resilient_train.core.transaction import Transaction
from resilient_train.core.tree import local_part
from resilient_train.core.vitals import mean, scalar
from resilient_train.extensions import Extension
from resilient_train.extensions.trials.arithmetic import (
    JUDGED,
    Arm,
    NoProgress,
    NoProgressConfig,
    beats,
    best_of,
    cost_of,
    is_ahead,
    is_lower,
    learns,
)
from resilient_train.ground.errors import StorageFailed, TrainError
from resilient_train.ground.types import NO_LIMIT, OUTSIDE, Action, Anomaly, Decision, Signal, Tried, by_signal
from resilient_train.ground.wording import log, say
from resilient_train.parts.run import Run
from resilient_train.processes.world import is_out_of_memory

_LONGEST_RACE = 48  # updates of an arm in a short run
_BEHIND = 0.4  # of the way that the run has come, by which an arm of half the updates may be behind it
_USUAL_INTERVAL = 25  # updates between two snapshots


class TrialStopped(Exception):
    """A trial cannot take place, or not be completed: then nothing has happened."""


class Trials(Extension, Hook):
    """Tries lower rates in a run whose updates can be made without its loop. All arms are judged on the same later
    samples, on which none of them was trained.
    """

    settings = MappingProxyType({"no_progress": NoProgressConfig})

    def checks(self, settings: Any) -> Mapping[str, Check]:
        self.no_progress = NoProgress(settings.no_progress)
        return {"no_progress": self.no_progress}

    def build(self, run: Run) -> None:
        self._parts = run
        self.updates = 0  # made in trials since the beginning of the run
        self.raced_in_vain = False  # no lower rate did better where the loss stood
        self.is_unjudged = False  # a lower rate might do better, and no race was over since that was asked
        run.effects.append(Effect("trials", self.state_dict, self.load_state_dict))
        if run.policy.rates and not run.policy.observe:
            run.hooks.insert(0, self)

    def before_update(self) -> None:
        """Where the loss stands, look for a lower rate, and continue from where it does better. Not while an incident
        is open, nor around a declared change.
        """
        run, check = self._parts, self.no_progress
        step, checks, started, before = run.clock.step, run.checks, time.perf_counter(), self.updates
        if checks.episode.is_open or step in checks.declared:
            return
        if not check.asks(step, lambda: travelled(run.ring, run.world.least)) or not run.settle():
            return
        is_possible, self.is_unjudged = self._is_possible(), self.is_unjudged or not before
        found = self._race() if is_possible else None
        check.tried(step, is_tried=self.updates > before or not is_possible)
        if found is None:
            run.controls.note()
            return
        since, rate, tried = found
        checks.require_recovery(step, step)
        if checks.episode.is_open:
            run.ring.keep_reference(step)
        anomaly = Anomaly(Signal.NO_PROGRESS, step, run.clock.tick, since, check.evidence)
        run.keeper.distrust(since)
        actions = Action("rewind"), Action("lower_lr", {"factor": rate, "lasting": True})
        decision = Decision(actions, rung=OUTSIDE)
        incident = replace(run.incident_log.open(anomaly, by_signal(anomaly), decision), tried=tried)
        run.recovery.carry_out(incident, (0, 0), started)

    def _is_possible(self) -> bool:
        """Say whether updates can be made without the loop, of samples that every rank finds again."""
        objective, samples = self._parts.backend.objective, self._parts.samples
        return objective is not None and objective.is_goal and (samples.rows > 0 or self._parts.world.size == 1)

    def left(self) -> int:
        """Return how many updates trials may still make."""
        steps = max(self._parts.planned() or 0, self._parts.clock.step)
        return max(0, self._parts.policy.budget.trial_updates(steps, in_vain=self.raced_in_vain) - self.updates)

    def state_dict(self) -> dict[str, Any]:
        if not (self.is_unjudged or self.updates):
            return {}  # nothing that a run without trials would lack
        return {"updates": self.updates, "in_vain": self.raced_in_vain, "unjudged": self.is_unjudged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates, self.raced_in_vain = int(state.get("updates", 0)), bool(state.get("in_vain"))
        self.is_unjudged = bool(state.get("unjudged"))

    def _race(self) -> tuple[int, float, tuple[Tried, ...]] | None:
        """Try lower rates from the oldest verified state since the loss is what it is: does one overtake the run, with
        half its updates or fewer?

        Cut at the present state, a rate looks better for a while even where it was right; in this comparison it looks
        worse. It also has to beat the present rate from that state, as some losses grow with training, whatever the
        rate. If none does, the one that came nearest is made as old as the run, and has to be far below it. Returns the
        step, what was changed there, and how all went.
        """
        parts, step, first, age = self._parts, self._parts.clock.step, self.no_progress.first, self.no_progress.age
        left, verified = self.left(), [one for one in parts.ring.verified_until(step) if one.step >= step - age]
        steps = min(age // 2, max(_LONGEST_RACE, left // 6))  # in a long run all rates may be tried for longer
        is_old = bool(verified) and verified[-1].step <= step - age + age // 4
        if not is_old or left < 2 * cost_of(steps, JUDGED) + cost_of(0, 2 * JUDGED):
            return None
        since = verified[-1]
        highest, *rates = parts.policy.rates
        with suppress(TrialStopped), self._trial():
            now, arms, control = self._begin(), list[Arm](), None

            def add_arms(*rates: float) -> None:
                for rate in rates:
                    if left - self._cost >= 2 * cost_of(steps, JUDGED):  # one more for the control
                        arms.append(self._run(rate, steps, since))

            is_thrown = now.loss - first > 2 * abs(first)  # then any rate that is low enough does better
            add_arms(highest, *(rates if is_thrown else ()))
            if any(is_lower(arm, now) for arm in arms):
                control = self._run(1.0, steps, since)
                if not is_thrown and any(beats(arm, control, now, first) for arm in arms):
                    add_arms(*rates)
            winners = [arm for arm in arms if control is not None and beats(arm, control, now, first)]
            nearest = min(arms, key=lambda arm: arm.loss)
            longer = min(step - since.step, left - self._cost - cost_of(0, JUDGED))
            is_near = nearest.loss <= now.loss + _BEHIND * max(0.0, first - now.loss)
            if not winners and longer > steps and is_near:
                grown = self._run(nearest.rate, longer, since)
                arms[arms.index(nearest)] = grown
                winners = [grown] if is_ahead(grown, now, first) else []
            self.is_unjudged = False
            if winners:
                won = best_of(sorted(winners, key=lambda arm: -arm.rate))
                shown = [now, *arms] if control is None else [now, *arms, control]
                tried = tuple(Tried(one.rate, one.since, one.anomalies, one.loss, one is won) for one in shown)
                return since.step, won.rate, tried
            # Arms that were as short as the run is young have not shown all: look again later.
            if steps >= _LONGEST_RACE or learns(now, first):
                self.raced_in_vain = True
                log.debug("%s; lower rates did no better", say(self.no_progress.evidence))
        return None  # it was stopped, or in vain

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Prepare a trial and take it back."""
        parts, ring, attributes = self._parts, self._parts.ring, self._parts.backend.attributes
        self._attributes = attributes.now()
        self._made = self._forwards = 0  # updates made so far, and forwards of updates that are judged
        if (state := ring.aside()) is None:  # a further copy exceeds the memory that snapshots may take
            raise TrialStopped
        self._state = state
        rates = [group["lr"] for group in parts.updater.groups()]  # no state restores those of the loop or optimizer
        parts.updater.gate.limit(NO_LIMIT, NO_LIMIT)  # its own were learned on the way that a trial leaves
        try:
            yield
        finally:
            self.updates += self._cost
            attributes.set(self._attributes)
            ring.load(state)
            for group, rate in zip(parts.updater.groups(), rates, strict=True):
                group["lr"] = rate

    @property
    def _cost(self) -> int:
        return cost_of(self._made, self._forwards)

    def _begin(self) -> Arm:
        """Fetch the samples that judge all arms, after all that train any; the newest, where only a trainer knows what
        comes. Leave out updates that cannot be fetched. Return how the run as it is does there.
        """
        samples, each = self._parts.samples, self._parts.samples.slicing.samples
        after = max(samples.next_start, samples.position) + each
        later = samples.starts(after, (JUDGED + 1) * each)
        starts = (later or samples.starts(samples.position - (JUDGED + 1) * each, JUDGED * each))[:JUDGED]
        fetched: dict[int, list[Any]] = {}
        for start in starts:
            with suppress(Exception):
                fetched[start] = samples.batches_at(start)
        by_rank = self._parts.world.all_of([*fetched])
        self._judged = {start: fetched[start] for start in starts if all(start in one for one in by_rank)}
        if len(self._judged) < JUDGED // 2:
            raise TrialStopped
        now = self._run(1.0, 0)
        if not now.equals(self._run(1.0, 0)):  # the program keeps state of its own
            raise TrialStopped
        return now

    def _run(self, rate: float, steps: int, since: Snapshot | None = None) -> Arm:
        """Make `steps` updates with a multiple of the rate, from the state at hand, or from that of a snapshot."""
        parts = self._parts
        parts.ring.load(self._state if since is None else since.parts)
        self._parts.backend.attributes.set(self._attributes)
        before = self._parts.controls.effects.state_dict()
        try:
            if rate < 1:
                parts.updater.knobs.turn_lr(rate, lasting=True)
            anomalies = sum(not self._update() for _ in range(steps))
            losses = self._losses()
        except Exception as error:  # of the program, which the weights it was led to may cause
            is_fetch = isinstance(error, StorageFailed)
            if (isinstance(error, TrialStopped | TrainError) and not is_fetch) or parts.world.size > 1:
                raise
            if is_fetch or is_out_of_memory(error) or not steps:  # no arm could be made, or not compared with the run
                raise TrialStopped from error
            anomalies, losses = steps, (math.inf,) * len(self._judged)
        finally:
            self._parts.controls.effects.undo_to(before)
        return Arm(rate, None if since is None else since.step, anomalies, losses)

    def _computed(self, mark: Mark) -> torch.Tensor:
        """Run forward and backward of the next update as in training; return the loss, NaN if something raised."""
        run, losses = self._parts, []
        update = run.samples.next_update()
        begun = Transaction(update, run.clock.tick + 1, run.clock.step + 1, mark)
        run.seeds.for_update(update.start)
        for batch in update.batches:
            begun.inputs.append(batch)
            try:
                loss, _ = run.backend.compute(run.world.on_device(batch))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                instead = next(filter(None, (one.loss_instead(error, [begun]) for one in run.on_error)), None)
                if not isinstance(instead, tuple):
                    raise
                loss, _ = instead
            losses.append(scalar(loss))
        loss = losses[0] if len(losses) < 2 else mean(losses)
        return torch.full_like(loss, math.nan) if update.failed or begun.raised else loss

    def _update(self) -> bool:
        parts, marks, controls = self._parts, self._parts.marks, self._parts.controls
        updater, world = parts.updater, parts.world
        if self._parts.stop():
            updater.agreement.ask_to_stop()
        mark = marks.take()
        loss = self._computed(mark)
        assert parts.backend.objective is not None
        parts.backend.objective.clip()
        parts.ring.copier.before_change()
        attempt = updater.apply(parts.clock.step, loss)
        reduced, norm, *rest = attempt.numbers or attempt.measured.tolist()
        is_asked = self._parts.stop() if world.size == 1 else rest[int(updater.scaler is not None)] > 0
        if is_asked:
            raise TrialStopped
        if is_landed := updater.gate.admits(reduced, norm):
            parts.clock.step += 1
            updater.accept(parts.clock.step)
            controls.advance(was_limited=attempt.is_limited)
        else:
            marks.undo(mark, keeps_scale=True)
        self._made += 1
        parts.beat()
        # A loss scale that is too high is found out by an overflow.
        return is_landed or (updater.scaler is not None and math.isfinite(reduced))

    def _losses(self) -> tuple[float, ...]:
        """Measure the losses of the later updates, averaged over the ranks. Each micro-batch frees its graph."""
        parts, made_by, losses = self._parts, self._parts.backend, []
        is_sharded = parts.state.is_sharded  # before a forward, which may leave no weight sharded
        assert made_by.objective is not None
        for start, batches in self._judged.items():
            made, has_ended = [], parts.stop()
            try:
                parts.seeds.for_update(start)
                for batch in batches:
                    loss, _ = made_by.objective(made_by.bare, parts.world.on_device(batch))
                    if is_sharded:  # only a backward makes every rank drop the weights of the others again
                        made_by.backward(loss)
                        parts.updater.drop_gradients()
                    made.append(loss.detach().float())
                    del loss
            except Exception:
                if parts.world.size == 1 or is_sharded:  # there other ranks are inside of this forward
                    raise
                has_ended = True
            self._forwards += 1
            parts.beat()
            if parts.world.least(-float(has_ended)) < 0:
                raise TrialStopped
            losses.append(mean(made))
        return tuple(parts.world.mean(torch.stack(losses)).tolist())


def _square(weight: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(weight)) ** 2


def travelled(ring: Ring, agree: Callable[[float], float]) -> float:
    """Return how far the weights moved between the two newest snapshots, relative to their norm; 0 without two. Scaled
    to 25 updates, as in a random walk; the least of all ranks. The host waits; a collective.
    """
    if len(ring.snapshots) < 2:
        return 0.0
    ring.copier.wait()
    older, newer = (one.parts["weights"] for one in ring.snapshots[-2:])
    moved = norm = 0.0
    for name in newer.keys() & older.keys():
        if newer[name] is older[name]:  # frozen
            continue
        now = local_part(newer[name])
        moved += _square(now - local_part(older[name]))
        norm += _square(now)
    share = _USUAL_INTERVAL / (ring.snapshots[-1].step - ring.snapshots[-2].step)
    return agree((share * moved / norm) ** 0.5 if norm else math.inf)  # a rank may hold no part of a weight
