"""Why something happened: what rows, replays, the state and the learning rate tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from resilient_train import landed
from resilient_train.data.samples import Update
from resilient_train.diagnose.damage import is_possible, of_state
from resilient_train.diagnose.search import Refused, by_looking
from resilient_train.diagnose.verdict import on_failed
from resilient_train.passed import Leap, UpdateHistory
from resilient_train.recover.causes import by_rate, by_signal
from resilient_train.recover.remedies import passes_over
from resilient_train.run_parts import RunParts
from resilient_train.state import randomness
from resilient_train.types import Anomaly, Cause, Diagnosis, Incident, Signal, Vitals, kind_of

_KNOWN_AFTER, _KNOWN_FOR = 2, 50  # incidents and updates: the like of the last two needs no search
_BY_LIMIT = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)
_OF_THE_RATE = (
    *(Signal.LOSS_SPIKE, Signal.GRAD_SPIKE, Signal.DIVERGENCE, Signal.NOT_RECOVERED),
    *(Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD, Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER),
)


class Explanation:
    """Looks for the cause of an anomaly, the cheapest way first."""

    def __init__(self, ward: RunParts, passed: UpdateHistory) -> None:
        self.ward, self.passed = ward, passed
        self._first = landed.FirstUpdates()
        self._foreseen: tuple[str, Diagnosis] | None = None  # of an anomaly that was found by its cause

    def since_leap(self, anomaly: Anomaly) -> tuple[Anomaly, Leap | None]:
        """Find out whether the rate rose lately. What landed after a leap of it is not to be trusted."""
        leap = self.passed.leap()
        if leap is None or not leap.is_sudden or anomaly.signal not in _OF_THE_RATE or leap.step > anomaly.since:
            return anomaly, leap
        return replace(anomaly, since=max(0, leap.step - 1)), leap

    def by_rate(self, anomaly: Anomaly, found: Diagnosis, leap: Leap | None) -> tuple[Diagnosis, Leap | None]:
        """Blame a rate that rose, and return it, unless something else explains the anomaly.

        Rows that are bad are so at any rate; and what rose slowly makes a loss worse, but breaks no operation.
        """
        if leap is None or found.cause is Cause.DATA:
            return found, None
        if not leap.is_sudden and (found.culprit is not None or found.cause is not Cause.EXPLOSION):
            return found, None
        if anomaly.signal not in (_OF_THE_RATE if leap.is_sudden else landed.OF_THE_LOSS):
            return found, None
        return by_rate(leap.factor, leap.step, is_sudden=leap.is_sudden), leap

    def of(
        self,
        anomaly: Anomaly,
        update: Update,
        refused: Refused | None,
        history: Sequence[Incident],
        leap: Leap | None = None,
    ) -> Diagnosis:
        """Why it happened, as far as it can be told. Every rank comes here. Raises NoMeasure."""
        ward = self.ward
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen[0] == anomaly.evidence:
            return foreseen[1]
        if anomaly.signal is Signal.EXCEPTION:
            told = {one.row: str(one) for one in update.failed}
            return on_failed({row: why for one in ward.world.all_of(told) for row, why in one.items()})
        if anomaly.landed:
            return self._of_landed(anomaly, history, leap)
        return self._of_refused(anomaly, refused, history) or by_signal(anomaly)

    def _of_refused(self, anomaly: Anomaly, refused: Refused | None, history: Sequence[Incident]) -> Diagnosis | None:
        search, ward = self.ward.search, self.ward
        if refused is None:
            return None
        if search is not None:
            known = _known(anomaly, history)
            if known is not None and (confirmed := search.confirmed(known, refused)) is not None:
                return confirmed
            found = search.diagnose(anomaly, refused, self.passed.lately())
            if found is None or found.cause is not Cause.DATA or anomaly.signal not in _BY_LIMIT:
                return found
            more = landed.far_out(ward, [refused.update.start])  # those to come as well
            return found if more is None else replace(found, rows=tuple(sorted({*found.rows, *more.rows})))
        if anomaly.signal in _BY_LIMIT:
            return landed.far_out(ward, [refused.update.start])
        if anomaly.signal is not Signal.NONFINITE_BATCH:
            return None
        with randomness.preserved(ward.world.device):  # to fetch rows leaves them anywhere
            return by_looking(refused.update, ward.samples, ward.world)

    def _of_landed(self, anomaly: Anomaly, history: Sequence[Incident], leap: Leap | None) -> Diagnosis:
        ward = self.ward
        if anomaly.signal in landed.OF_THE_LOSS and not (leap and leap.is_sudden):
            found = landed.samples_behind(anomaly, ward, self.passed)
            if found is not None:
                return found
        proven = ward.ring.proven(anomaly.since)
        before = proven[0].snapshot.parts["weights"] if proven else {}
        damage = of_state(anomaly, dict(ward.state.model.named_parameters()), before, ward.updater.optimizers)
        theirs = enumerate(ward.world.all_of(damage))  # of a healthy rank it tells what moved farthest in health
        to_ask = [one for rank, one in theirs if not anomaly.ranks or rank in anomaly.ranks]
        worst = max((one for one in to_ask if one is not None), key=lambda one: one.size, default=None)
        found = worst.diagnosis if worst is not None else None
        return _is_the_optimizers(anomaly, found or by_signal(anomaly), history)

    def foresee(self, vitals: Vitals, fed: Sequence[Any]) -> Anomaly | None:
        """An anomaly that is found by its cause: bad rows, where the first updates differ wildly."""
        if (found := landed.at_start(self.ward, self.passed, vitals, self._first, fed)) is None:
            return None
        anomaly, diagnosis = found
        self._foreseen = anomaly.evidence, diagnosis
        return anomaly


def _is_the_optimizers(anomaly: Anomaly, found: Diagnosis, history: Sequence[Incident]) -> Diagnosis:
    """What breaks again at the same place, on the way that was made anew, is no accident of the hardware."""
    again = [one for one in history[-_KNOWN_AFTER:] if one.anomaly.signal is anomaly.signal]
    if anomaly.signal is Signal.RANK_MISMATCH:
        return found  # with the same gradients every optimizer comes to the same weights
    if found.cause is not Cause.CORRUPTION or not any(one.anomaly.since == anomaly.since for one in again):
        return found
    cause = Cause.EXPLOSION if is_possible(anomaly) else Cause.OPTIMIZER
    return Diagnosis(cause, f"It came again at the same place after a rewind. {found.advice}")


def _known(anomaly: Anomaly, history: Sequence[Incident]) -> Diagnosis | None:
    """The culprit of the last incidents, where nothing was done about it but passing over."""
    last = history[-_KNOWN_AFTER:]
    first = last[0].diagnosis if len(last) == _KNOWN_AFTER else None
    if first is None or first.culprit is None:
        return None
    return first if all(_is_like(one, anomaly, first) for one in last) else None


def _is_like(incident: Incident, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
    one = incident.anomaly
    return (
        one.signal is anomaly.signal
        and anomaly.tick - one.tick <= _KNOWN_FOR
        and kind_of(one, incident.diagnosis) == kind_of(anomaly, diagnosis)
        and passes_over(incident.decision.actions)
    )
