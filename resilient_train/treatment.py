"""What is done about an incident, from its first sign to the update that the run goes on with."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from resilient_train.checkpoint import last_good
from resilient_train.data.samples import Samples, Slicing, Update
from resilient_train.errors import GaveUp, in_one_line
from resilient_train.events import Anomaly, Diagnosis, Incident, Outcome
from resilient_train.ranks.world import World
from resilient_train.record.console import log
from resilient_train.record.incidents import IncidentBook, farewell, outcome_told, told
from resilient_train.recover.causes import by_signal
from resilient_train.recover.decide import decide
from resilient_train.recover.history import History
from resilient_train.recover.knobs import Knobs
from resilient_train.recover.policy import Policy
from resilient_train.recover.remedies import Applicable, passes_over, remedy
from resilient_train.state.ring import Held, Ring
from resilient_train.state.run_state import Clock, RunState
from resilient_train.update.precision import Precision
from resilient_train.update.updater import Updater
from resilient_train.watch.checks import Panel
from resilient_train.watch.scans import Scans


class Passed(NamedTuple):
    """An update that was attempted: which it would be, and where its samples lie."""

    step: int
    start: int
    stop: int


@dataclass
class Ward:
    """The rooms that remedies reach into."""

    world: World
    clock: Clock
    samples: Samples
    slicing: Slicing
    state: RunState
    updater: Updater
    ring: Ring
    panel: Panel
    scans: Scans
    precision: Precision


class Treatment:
    """Diagnoses, decides, acts, and writes down each of it. To the remedies it is the patient."""

    def __init__(self, ward: Ward, policy: Policy, book: IncidentBook, *, recovered_after: int) -> None:
        self.ward, self.policy, self.book = ward, policy, book
        self.knobs = Knobs(relax_after=policy.relax_after)
        self.history = History(book.incidents, recovered_after=recovered_after)
        self._passed: deque[Passed] = deque(maxlen=10_000)
        self._anomaly: Anomaly | None = None
        self._blamed = (0, 0)
        self._rewound: Held | None = None

    def heard(self, step: int, update: Update) -> None:
        """Note an update that was attempted, in case it is to blame for something later."""
        self._passed.append(Passed(step, update.start, update.stop))

    def healthy(self) -> None:
        """Note that an update landed without trouble."""
        self.knobs.advance()
        self._close(self.history.accepted(), self.history.recovered_after)

    def treat(self, anomaly: Anomaly, update: Update, *, refused: bool) -> None:
        """Do what the policy prescribes about the newest update. Raises GaveUp where it has nothing left."""
        started, before, ward = time.perf_counter(), self.ward.clock.step, self.ward
        self._anomaly, self._rewound = anomaly, None
        self._blamed = self._samples_to_blame(anomaly, update)
        ward.ring.distrust(anomaly.since)
        diagnosis = self._diagnose(anomaly)
        decision = decide(
            self.policy, anomaly, diagnosis, self.history.incidents, ward.clock.tick, self._applicable(anomaly)
        )
        incident, closed = self.history.open(anomaly, diagnosis, decision)
        self._close(closed)
        self.book.opened(incident)
        if decision.gave_up is not None:
            self._give_up(incident)
        if not passes_over(decision.actions):
            self.knobs.trouble()
        for action in decision.actions:
            remedy(action).apply(self)
        if self._rewound is not None:
            self.history.undone(before - ward.clock.step)
            as_before = self.knobs.values.lr == 1.0
            ward.panel.rewound(self._rewound.step, anomaly.since, comparable=as_before)
        incident = dataclasses.replace(
            incident,
            rewound_to=self._rewound.step if self._rewound else None,
            steps_lost=before - ward.clock.step + refused,
            seconds=time.perf_counter() - started,
        )
        self.history.treated(incident)
        self.book.treated(incident)
        log.warning("%s", told(incident))

    def finish(self) -> None:
        """The run ended healthy: whatever is open has recovered."""
        self._close(self.history.finish())

    # What remedies may do.

    def rewind(self, older: int = 0, steps: int = 0) -> None:
        """Go back to a proven state: the newest one, an older one, or one at least `steps` back."""
        assert self._anomaly is not None
        proven = self.ward.ring.proven(self._anomaly.since)
        far_enough = [held for held in proven if held.step <= self._anomaly.step - steps] or proven[-1:]
        held = far_enough[min(older, len(far_enough) - 1)]
        self.ward.ring.restore(held)
        self.ward.panel.load_state_dict(held.statistics["panel"])
        self.ward.scans.load_state_dict(held.statistics["scans"])
        while self._passed and self._passed[-1].step > held.step:
            self._passed.pop()
        self._rewound = held

    def skip(self, updates: int | None = None) -> None:
        """Pass over the samples to blame, or over as many updates' worth from where the run stands now."""
        start, stop = self._blamed
        if updates is not None:
            start = self.ward.samples.position if self._rewound else start
            stop = max(stop, start + updates * self.ward.slicing.samples)
        self.ward.samples.skip(start, stop)

    def reset_moments(self) -> None:
        """Let the optimizers begin anew."""
        self.ward.updater.reset_moments()
        self.ward.scans.rebase()

    def lower_loss_scale(self, factor: float) -> None:
        """Scale the loss by less from now on."""
        scaler = self.ward.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    # How it is done.

    def _diagnose(self, anomaly: Anomaly) -> Diagnosis:
        """Why it happened, as far as the vitals allow."""
        return by_signal(anomaly)

    def _applicable(self, anomaly: Anomaly) -> Applicable:
        return Applicable(
            snapshots=len(self.ward.ring.proven(anomaly.since)),
            mixed_precision=self.ward.precision.is_mixed,
            loss_scaler=self.ward.updater.scaler is not None,
        )

    def _samples_to_blame(self, anomaly: Anomaly, update: Update) -> tuple[int, int]:
        """Those of the update that was refused; of what landed, all since the newest step to be trusted."""
        starts = [one.start for one in self._passed if one.step > anomaly.since] if anomaly.landed else []
        return min([*starts, update.start]), update.stop

    def _give_up(self, incident: Incident) -> NoReturn:
        """End the run on its newest proven state, and leave that on disk."""
        ward, book = self.ward, self.book
        book.closed(incident)
        held, path = ward.ring.last_good(incident.anomaly.since), None
        if held is not None:
            ward.ring.restore(held)
            path = self._written(held)
        if ward.world.is_main:  # every rank comes here, and one knows where the state was written
            log.error("%s", farewell(incident, path, self.history.incidents[:-1]))
        raise GaveUp(f"gave up at step {incident.anomaly.step}: {incident.decision.gave_up}", path)

    def _written(self, held: Held) -> Path | None:
        """Leave a state on disk; where that fails the run ends as it would have, and says so."""
        if self.book.directory is None:
            return None
        try:
            return last_good.save(self.book.directory, held.step, self.ward.state.model, held.snapshot.parts)
        except (OSError, TypeError) as error:
            log.error("the last good state, of step %d, could not be written: %s", held.step, in_one_line(error))
            return None

    def _close(self, incidents: Iterable[Incident], healthy_steps: int | None = None) -> None:
        for incident in incidents:
            self.book.closed(incident)
            if incident.outcome is Outcome.RECOVERED:  # what recurs is told by the incident that it recurs in
                log.info("%s", outcome_told(incident, healthy_steps))
