"""What remedies change in a run: places to go back to, the data, the knobs; and what of that lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from resilient_train.core.protocols import Effect, Parts, Store
from resilient_train.core.remedies import Case, is_mild, remedy
from resilient_train.core.ring import Snapshot
from resilient_train.core.state import Clock
from resilient_train.ground.errors import TrainError, unusable
from resilient_train.ground.types import Anomaly, Diagnosis, Incident

_EARLY_STEPS = 16  # a failure within so many accepted updates counts as one from the start
E = TypeVar("E")


class Controls:
    """What remedies may do to a run. Unless samples are skipped, a refused update is retried with the same ones."""

    incident: Incident  # the one that is being treated, and what was done so far
    suspects: tuple[int, int]  # the samples that it may come from

    def __init__(self, parts: Parts, store: Store, log: Any) -> None:
        self._parts, self._store, self._log = parts, store, log
        self._refused_in_a_row = 0  # updates since one landed or the run was rewound
        updater, episode = parts.updater, parts.checks.episode
        self.knobs = knobs = updater.knobs

        def set_usual_norm(norm: Any) -> None:
            updater.usual_norm = float(norm or 0.0) or None

        self.effects = Effects(
            parts.clock,
            [
                Effect("knobs", knobs.state_dict, knobs.load_state_dict, undo=knobs.load_state_dict),
                *parts.effects,
                Effect("usual_norm", lambda: updater.usual_norm, set_usual_norm),
                Effect("reference", episode.persistent_state, episode.load_persistent_state),
            ],
        )

    def advance(self, *, was_limited: bool, may_relax: bool = True) -> None:
        """Count a healthy update, for what lasts so many."""
        self._refused_in_a_row = 0
        self.knobs.advance(was_limited=was_limited, may_relax=may_relax)
        for one in self._parts.updater.lasting:
            one.advance()

    def apply(self, incident: Incident, suspects: tuple[int, int], started: float, *, was_refused: bool) -> Incident:
        """Apply the remedies; [start, stop) are suspect samples. The caller notes result and effects in one entry."""
        checks, clock, actions = self._parts.checks, self._parts.clock, incident.decision.actions
        step_before, is_mildly_treated = clock.step, is_mild(actions)
        self.incident, self.suspects = replace(incident, rewound_to=None), suspects
        self._refused_in_a_row += was_refused
        if not is_mildly_treated:
            self.knobs.trouble()
        for action in actions:
            remedy(action).apply(self)
        treated = self.incident
        if treated.rewound_to is not None:
            checks.rewound(treated.rewound_to, incident.anomaly.since, self.knobs.lr)
        elif incident.reached_weights and not is_mildly_treated:
            checks.episode.stayed(clock.step, self.knobs.lr)
        seconds = time.perf_counter() - started
        return replace(treated, steps_lost=step_before - clock.step + was_refused, seconds=seconds)

    # The methods that remedies call.

    def extension(self, kind: type[E]) -> E:
        return next(one for one in self._parts.extensions if isinstance(one, kind))

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        """Go to the newest verified state not after `since`, `older` before it, `steps` back at least, or oldest."""
        parts, anomaly = self._parts, self.incident.anomaly
        with parts.across_rewind():
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
        step, self._refused_in_a_row = parts.clock.step, 0
        self.incident = replace(self.incident, rewound_to=step)
        parts.updates.rewound(step)

    def skip(self, updates: int | None = None) -> None:
        """Skip the samples that may be to blame, or a window of `updates` from here."""
        samples, (start, stop) = self._parts.samples, self.suspects
        if updates is not None:
            start = start if self.incident.rewound_to is None else samples.position
            stop = max(stop, start + updates * samples.slicing.samples)
        samples.skip(start, stop)

    def case(self, anomaly: Anomaly, diagnosis: Diagnosis) -> Case:
        """Return what decides which remedies apply. All ranks call it together."""
        parts, since = self._parts, anomaly.since
        verified, reference = parts.ring.verified_until(since), parts.checks.episode.reference
        is_early = max(since, reference.step if reference else 0) < _EARLY_STEPS
        known: dict[str, Any] = {
            "snapshots": len(verified) or int(self._store.has_verified(since)),
            "refused_in_a_row": 0 if anomaly.landed else self._refused_in_a_row,
            "at_start": is_early and [snapshot.step for snapshot in verified] == [0],
            "rows": parts.samples.rows,
            "quarantined": parts.samples.quarantined,
            "own_rates": any(group["lr"] is None for group in parts.updater.groups()),
            "sgd": all(isinstance(one, torch.optim.SGD) for one in parts.updater.optimizers),
        }
        facts: dict[str, Any] = {}
        for one in parts.extensions:
            facts |= one.facts(diagnosis, since, anomaly.landed)
        known |= {name: facts[name] for name in known.keys() & facts.keys()}  # an extension may know better
        return Case(anomaly, diagnosis, facts=facts, **known)

    def snapshot(self, step: int, *, verified: bool = False) -> Snapshot | None:
        snapshot = self._parts.ring.take(step, verified=verified)
        if snapshot is not None:
            snapshot.checks_state, snapshot.effects = self._parts.checks_state(), self.effects.state_dict()
        return snapshot

    def note(self, write: Callable[..., object] | None = None) -> None:
        """Write into the journal which effects have changed: in one entry with an incident, if `write` writes that."""
        (write or self._log.note_effects)(effects=self.effects.changes())
        for one in self._parts.effects:
            one.noted()


class Effects:
    def __init__(self, clock: Clock, effects: Sequence[Effect]) -> None:
        self._clock, self._effects = clock, effects
        self._noted: dict[str, list[Any]] = {}  # the lists that the journal has from this process
        self.noted: Mapping[str, Any] = {}  # all that the journal has
        self.has_dropped = False  # some of what was in effect

    def state_dict(self) -> dict[str, Any]:
        return {"tick": self._clock.tick, **{effect.name: effect.state() for effect in self._effects}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the effects of an earlier process."""
        known = {"tick", *(effect.name for effect in self._effects)}
        if unknown := [name for name in state.keys() - known if state[name]]:
            why = f"{min(unknown)} is in effect in this run, and nothing that is installed here knows it"
            raise unusable("recovery", why)
        self.noted = state
        for effect in self._effects:
            if effect.name in state:  # else its entry of the journal was damaged
                self.has_dropped |= bool(effect.restore(state[effect.name]))

    def undo_to(self, state: Mapping[str, Any]) -> None:
        """Undo what can be undone of all that has changed since `state_dict` returned this."""
        for effect in self._effects:
            if effect.name in state:
                effect.undo(state[effect.name])

    def changes(self) -> dict[str, Any]:
        """Return the state for the journal: of lists what was `added` since the last call, unless some was undone."""
        self.noted = state = self.state_dict()
        lists = {name: one for name, one in state.items() if isinstance(one, list)}
        grown = [name for name, noted in self._noted.items() if lists[name][: len(noted)] == noted]
        added = {name: lists[name][len(self._noted[name]) :] for name in grown}
        self._noted = lists
        return {**{name: one for name, one in state.items() if name not in added}, "added": added}

    def agreed(self) -> list[Any]:
        return [effect.agreed() for effect in self._effects]
