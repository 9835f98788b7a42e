"""What remedies change in a run: places to go back to, the data, the knobs; and what of that lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from struct import pack
from typing import Any
from zlib import crc32

from resilient_train.core.effects import Effect, Effects, skipped_samples
from resilient_train.core.knobs import Knobs
from resilient_train.core.parts import Parts
from resilient_train.core.policy import Policy
from resilient_train.core.protocols import Log, Store
from resilient_train.core.remedies import Case, RunControl, is_mild, remedy
from resilient_train.core.ring import Snapshot
from resilient_train.errors import TrainError
from resilient_train.types import Action, Anomaly, Diagnosis, Incident


class Controls(RunControl):
    """Applies remedies to a run. What of that lasts is in its list of effects."""

    _incident: Incident  # the one that is being treated, and what was done so far
    _suspects: tuple[int, int]  # the samples that it may come from

    def __init__(self, parts: Parts, policy: Policy, store: Store, log: Log, more: Sequence[Effect] = ()) -> None:
        """`more` are effects of remedies that this class does not know."""
        self._parts, self._policy, self._store, self._log = parts, policy, store, log
        self.knobs = knobs = Knobs(relax_after=policy.relax_after)
        updater, episode = parts.updater, parts.checks.episode

        def set_usual_norm(norm: Any) -> None:
            updater.usual_norm = float(norm or 0.0) or None

        self.effects = Effects(
            parts.clock,
            [
                Effect("knobs", knobs.state_dict, knobs.load_state_dict, undo=knobs.load_state_dict),
                skipped_samples(parts.samples),
                *more,
                Effect("usual_norm", lambda: updater.usual_norm, set_usual_norm),
                Effect("reference", episode.persistent_state, episode.load_persistent_state),
            ],
        )

    def apply(self, incident: Incident, suspects: tuple[int, int], started: float, *, was_refused: bool) -> Incident:
        """Apply the remedies of an incident, which may come from [start, stop) of the samples; return what was done.

        Whoever calls this notes it: then the journal has an incident as treated at once with the effects.
        """
        checks, clock, actions = self._parts.checks, self._parts.clock, incident.decision.actions
        step_before, is_mildly_treated = clock.step, is_mild(actions)
        self._incident, self._suspects = replace(incident, rewound_to=None), suspects
        if not is_mildly_treated:
            self.knobs.trouble()
        self._apply(actions)
        treated = self._incident
        if treated.rewound_to is not None:
            self._store.rewound(treated.rewound_to)
            checks.rewound(treated.rewound_to, incident.anomaly.since, self.knobs.lr)
        elif incident.anomaly.reached_weights and not is_mildly_treated:
            checks.stayed(clock.step, self.knobs.lr)
        seconds = time.perf_counter() - started
        return replace(treated, steps_lost=step_before - clock.step + was_refused, seconds=seconds)

    def _apply(self, actions: Iterable[Action]) -> None:
        for action in actions:
            remedy(action).apply(self)

    # The methods that remedies call; see `RunControl`.

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        parts, anomaly = self._parts, self._incident.anomaly
        with parts.buffers.across_rewind():
            if verified := parts.ring.verified_until(anomaly.since):
                far_enough = [one for one in verified if one.step <= anomaly.step - steps] or verified[-1:]
                snapshot = far_enough[min(older, len(far_enough) - 1)]
                parts.ring.restore(snapshot)
                parts.restore_checks_state(snapshot.checks_state)
            elif self._store.restore(anomaly.since):
                parts.ring.clear()
                self.snapshot(parts.clock.step, verified=True)
            else:
                raise TrainError(f"no verified state from before step {anomaly.since + 1} can still be read")
        step = parts.clock.step
        self._incident = replace(self._incident, rewound_to=step)
        parts.updates.rewound(step)

    def skip(self, updates: int | None = None) -> None:
        samples, (start, stop) = self._parts.samples, self._suspects
        if updates is not None:
            start = start if self._incident.rewound_to is None else samples.position
            stop = max(stop, start + updates * samples.slicing.samples)
        samples.skip(start, stop)

    def reset_moments(self) -> None:
        self._parts.updater.reset_moments()
        self._parts.scans.rebase()

    # What outlives a rewind, and what decides.

    def case(self, anomaly: Anomaly, diagnosis: Diagnosis) -> Case:
        """Collect what decides which remedies apply. It is a collective: all ranks call it together."""
        verified = self._parts.ring.verified_until(anomaly.since)
        return Case(
            anomaly,
            diagnosis,
            snapshots=len(verified) or int(self._store.has_verified(anomaly.since)),
            loss_excess=self._parts.checks.loss_excess(),
            usual_rate=diagnosis.usual_rate,
            leapt_to=diagnosis.leapt_to,
        )

    def snapshot(self, step: int, *, verified: bool = False) -> Snapshot | None:
        snapshot = self._parts.ring.take(step, verified=verified)
        if snapshot is not None:
            snapshot.checks_state, snapshot.effects = self._parts.checks_state(), self.effects.state_dict()
        return snapshot

    def note(self, write: Callable[..., object] | None = None) -> None:
        """Write into the journal which effects have changed: in one entry with an incident, if `write` writes that."""
        (write or self._log.note_effects)(effects=self.effects.changes())

    def digest(self) -> int:
        """Digest what ranks have to agree on. Knobs as float32, as their last digit may differ between machines."""
        clock, samples, knobs = self._parts.clock, self._parts.samples, self.knobs.values
        place = clock.step, clock.tick, samples.position, samples.slicing.samples
        more = self.effects.agreed(), self._parts.updater.rates()
        return crc32(repr(more).encode(), crc32(pack(f"<4q{len(knobs)}f", *place, *knobs)))
