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
from resilient_train.diagnose.damage import lost_eps, of_state
from resilient_train.diagnose.search import Refused, Search
from resilient_train.diagnose.verdict import again, on_failed
from resilient_train.errors import GaveUp, in_one_line
from resilient_train.events import Anomaly, Cause, Diagnosis, Incident, Outcome, Signal, Vitals
from resilient_train.numerics.armor import Armor, CannotArmor
from resilient_train.ranks.world import World
from resilient_train.record.console import log
from resilient_train.record.incidents import IncidentBook, farewell, outcome_told, told
from resilient_train.record.quarantine import Quarantine
from resilient_train.recover.causes import by_signal
from resilient_train.recover.decide import decide
from resilient_train.recover.history import History, kind_of
from resilient_train.recover.knobs import Knobs
from resilient_train.recover.policy import Policy
from resilient_train.recover.remedies import Applicable, PutOnArmor, passes_over, remedy
from resilient_train.state.ring import Held, Ring
from resilient_train.state.run_state import Clock, RunState
from resilient_train.update.precision import Precision
from resilient_train.update.updater import Updater
from resilient_train.watch.checks import Panel
from resilient_train.watch.scans import Scans

_KNOWN_AFTER, _KNOWN_FOR = 2, 50  # incidents and updates: the like of the last two needs no search
_TREND = 32  # accepted updates


class Passed(NamedTuple):
    """An update that was attempted: which it would be, where its samples lie, and what it measured."""

    step: int
    start: int
    stop: int
    accepted: bool
    loss: float
    norm: float


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
    search: Search | None  # None where a step cannot be replayed


class Treatment:
    """Diagnoses, decides, acts, and writes down each of it. To the remedies it is the patient."""

    def __init__(
        self, ward: Ward, policy: Policy, book: IncidentBook, quarantined: Quarantine, *, recovered_after: int
    ) -> None:
        self.ward, self.policy, self.book, self.quarantined = ward, policy, book, quarantined
        self.knobs = Knobs(relax_after=policy.relax_after)
        self.history = History(book.incidents, recovered_after=recovered_after)
        self._passed: deque[Passed] = deque(maxlen=10_000)
        self._anomaly: Anomaly | None = None
        self._diagnosis: Diagnosis | None = None
        self._armor = Armor()
        self._armored: set[tuple[str, int, str]] = set()  # by file, line and operation; also where it could not be
        self._blamed = (0, 0)
        self._rewound: Held | None = None

    def heard(self, vitals: Vitals) -> None:
        """Note an update that was attempted, in case it is to blame for something later."""
        accepted, step = vitals.accepted, vitals.step + (not vitals.accepted)
        self._passed.append(Passed(step, vitals.start, vitals.stop, accepted, vitals.loss, vitals.grad_norm))

    def healthy(self) -> None:
        """Note that an update landed without trouble."""
        self.knobs.advance()
        self._close(self.history.accepted(), self.history.recovered_after)

    def treat(self, anomaly: Anomaly, update: Update, refused: Refused | None = None) -> None:
        """Do what the policy prescribes about the newest update. Raises GaveUp where it has nothing left."""
        started, before, ward = time.perf_counter(), self.ward.clock.step, self.ward
        self._anomaly, self._rewound = anomaly, None
        self._blamed = self._samples_to_blame(anomaly, update)
        ward.ring.distrust(anomaly.since)
        ward.updater.usual_norm = ward.panel.usual_norm or ward.updater.usual_norm
        self._diagnosis = diagnosis = self._diagnosed(anomaly, update, refused)
        decision = decide(
            *(self.policy, anomaly, diagnosis, self.history.incidents, ward.clock.tick),
            self._applicable(anomaly, diagnosis),
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
            steps_lost=before - ward.clock.step + (refused is not None),
            seconds=time.perf_counter() - started,
        )
        self.history.treated(incident)
        self.book.treated(incident)
        log.warning("%s", told(incident))

    def disarm(self) -> None:
        """Give the user's code back as it was: another run of this process is to find its own faults."""
        self._armor.take_off()

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

    def quarantine(self) -> None:
        """Take the guilty rows out of the data."""
        assert self._diagnosis is not None
        assert self._anomaly is not None
        rows = self._diagnosis.rows
        self.ward.samples.quarantine(rows)
        self.quarantined.add(rows, self._diagnosis.advice, self._anomaly.step, self.history.incidents[-1].id)

    def armor(self) -> None:
        """Put armor around the guilty operation, for the rest of the run."""
        assert self._diagnosis is not None
        assert self._diagnosis.culprit is not None
        culprit = self._diagnosis.culprit
        where = (culprit.file, culprit.line, culprit.op)
        self._armored.add(where)
        self._armor.put_on(*where)
        if self.ward.search is not None:
            self.ward.search.armored.add(where)

    def mend_eps(self) -> None:
        """Raise an epsilon that is lost in its type to what the type can hold, for the rest of the run."""
        self.ward.updater.mends_eps = True

    def lower_loss_scale(self, factor: float) -> None:
        """Scale the loss by less from now on."""
        scaler = self.ward.updater.scaler
        if scaler is not None:
            scaler.update(scaler.get_scale() * factor)

    # How it is done.

    def _diagnosed(self, anomaly: Anomaly, update: Update, refused: Refused | None) -> Diagnosis:
        """Why it happened, as far as it can be told."""
        ward = self.ward
        if anomaly.signal is Signal.EXCEPTION:
            told = {one.row: str(one) for one in update.failed}
            return on_failed({row: why for one in ward.world.all_of(told) for row, why in one.items()})
        found: Diagnosis | None = None
        if not anomaly.landed:
            if refused is not None and ward.search is not None:
                known = self._known(anomaly)
                if known is not None and ward.search.confirms(known, refused):
                    return again(known)
                found = ward.search.diagnose(anomaly, refused, self._lately())
        else:
            proven = ward.ring.proven(anomaly.since)
            before = proven[0].snapshot.parts["weights"] if proven else {}
            found = of_state(anomaly, dict(ward.state.model.named_parameters()), before, ward.updater.optimizers)
            found = next((one for one in ward.world.all_of(found) if one is not None), None)
            found = self._is_the_optimizers(anomaly, found or by_signal(anomaly))
        return found or by_signal(anomaly)

    def _is_the_optimizers(self, anomaly: Anomaly, found: Diagnosis) -> Diagnosis:
        """What breaks again at the same place, on the way that was made anew, is no accident of the hardware."""
        again = [one for one in self.history.incidents[-_KNOWN_AFTER:] if one.anomaly.signal is anomaly.signal]
        if found.cause is not Cause.CORRUPTION or not any(one.anomaly.since == anomaly.since for one in again):
            return found
        return Diagnosis(Cause.OPTIMIZER, f"It came again at the same place after a rewind. {found.advice}")

    def _known(self, anomaly: Anomaly) -> Diagnosis | None:
        """The culprit of the last incidents, where nothing was done about it but passing over."""
        last = self.history.incidents[-_KNOWN_AFTER:]
        first = last[0].diagnosis if len(last) == _KNOWN_AFTER else None
        if first is None or first.culprit is None:
            return None
        return first if all(self._is_like(one, anomaly, first) for one in last) else None

    def _is_like(self, incident: Incident, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
        one = incident.anomaly
        return (
            one.signal is anomaly.signal
            and anomaly.tick - one.tick <= _KNOWN_FOR
            and kind_of(one, incident.diagnosis) == kind_of(anomaly, diagnosis)
            and passes_over(incident.decision.actions)
        )

    def _lately(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the last accepted updates, and of the one that was not."""
        lately = [*[one for one in self._passed if one.accepted][-_TREND:], self._passed[-1]]
        return [one.loss for one in lately], [one.norm for one in lately]

    def _applicable(self, anomaly: Anomaly, diagnosis: Diagnosis) -> Applicable:
        ward = self.ward
        return Applicable(
            snapshots=len(ward.ring.proven(anomaly.since)),
            mixed_precision=ward.precision.is_mixed,
            loss_scaler=ward.updater.scaler is not None,
            rows=ward.samples.rows,
            quarantined=len(self.quarantined.rows) - self.quarantined.given,
            armor=not anomaly.landed and all(ward.world.all_of(self._can_be_armored(diagnosis))),
            lost_eps=lost_eps(ward.updater.optimizers) is not None and not ward.updater.mends_eps,
        )

    def _can_be_armored(self, diagnosis: Diagnosis) -> bool:
        """Say whether it fits, unless it was tried before: what does not help once does not help twice.

        Only where the policy could put it on: to look for a line takes a pass over all objects.
        """
        culprit = diagnosis.culprit
        if culprit is None or not culprit.line or not diagnosis.mendable:
            return False
        rungs = self.policy.ladder(diagnosis.cause)
        if all(one.action.remedy != PutOnArmor.name for rung in rungs for one in rung.remedies):
            return False
        where = (culprit.file, culprit.line, culprit.op)
        if where in self._armored:
            return False
        try:
            self._armor.check(*where)
        except CannotArmor as why:
            self._armored.add(where)
            log.warning("no armor around `%s` at %s:%d: %s", culprit.op, culprit.file, culprit.line, why)
            return False
        return True

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
