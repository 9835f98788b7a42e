"""Why something happened: what rows, replays, the state, past updates and the learning rate say about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import truediv
from statistics import median
from typing import Any

import torch
from torch.optim import Optimizer

from resilient_train.data.samples import Samples, Update
from resilient_train.data.stream import Key
from resilient_train.diagnose import damage, verdict
from resilient_train.diagnose import rows as by_rows
from resilient_train.diagnose.search import Refused, Search, bad_rows_of
from resilient_train.ranks.world import World
from resilient_train.recover.causes import by_rate, by_signal
from resilient_train.recover.remedies import is_mild
from resilient_train.state import randomness
from resilient_train.state.ring import Ring
from resilient_train.state.run_state import RunState
from resilient_train.types import Anomaly, Cause, Diagnosis, Incident, Signal, Vitals, kind_of
from resilient_train.watch.reference import Reference
from resilient_train.watch.update_history import FEW, WILD, Leap, PastUpdate, UpdateHistory

_KNOWN_AFTER, _KNOWN_FOR = 2, 50  # incidents and updates: one like the last two needs no search
_BY_LIMIT = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)
_OF_THE_LOSS = (Signal.LOSS_SPIKE, Signal.DIVERGENCE, Signal.NOT_RECOVERED)
_OF_THE_RATE = (
    *(*_OF_THE_LOSS, Signal.GRAD_SPIKE, Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD),
    *(Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER),
)
_EXPLAINS = 0.5  # of a rise of the loss: as much has to come from the samples, so that these are to blame
_PART = 0.25  # of it: what rows have to raise the loss by to count among those that did it
_SAME = 1e-3  # of a loss: that of the same update at the same weights
_AHEAD = 2048  # samples that are looked at, once bad rows are among those before
_YOUNG = 16  # accepted updates, before which there is nothing to compare with
_TO_COMPARE = 5  # updates with bad rows, and without them, that a comparison takes
_CLEARLY = 0.9  # of the pairs of one with them and one without
_BEGUN = 24  # accepted updates that show whether they differ wildly
_OTHERS = 128  # rows that a row is compared with
_FAR_ABOVE = 100.0  # times what three of four rows do not exceed, or times the least of the first updates


class NoMeasure(Exception):
    """The losses from before are not those of the samples that the run had then: nothing is known to be worse."""


class Explainer:
    """Looks for the cause of an anomaly, the cheapest way first. Every rank comes to each of these calls."""

    def __init__(
        self,
        world: World,
        samples: Samples,
        state: RunState,
        ring: Ring,
        optimizers: Sequence[Optimizer],
        passed: UpdateHistory,
        search: Search | None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`search` is None where a step cannot be replayed; `beat` is called whenever a diagnosis has made progress."""
        self._world, self._samples, self._state, self._ring = world, samples, state, ring
        self._optimizers, self._passed, self._search, self._beat = optimizers, passed, search, beat
        self._first_sizes: dict[int, torch.Tensor] = {}  # the largest value of each field of the first updates
        self._foreseen: tuple[str, Diagnosis] | None = None  # of an anomaly that was found by its cause

    def since_leap(self, anomaly: Anomaly) -> tuple[Anomaly, Leap | None]:
        """Find out whether the learning rate rose lately. What landed after a leap of it is not to be trusted."""
        leap = self._passed.leap()
        if leap is None or not leap.is_sudden or anomaly.signal not in _OF_THE_RATE or leap.step > anomaly.since:
            return anomaly, leap
        return replace(anomaly, since=max(0, leap.step - 1)), leap

    def explain(
        self,
        anomaly: Anomaly,
        update: Update,
        refused: Refused | None,
        history: Sequence[Incident],
        reference: Reference | None,
        leap: Leap | None = None,
    ) -> tuple[Diagnosis, Leap | None]:
        """Why it happened, as far as that can be known, and the leap of the rate if that is to blame.

        `reference` is where the run stood before the trouble. Raises NoMeasure.
        """
        found = self._explained(anomaly, update, refused, history, reference, leap)
        # Rows that are bad are so at any rate; and what rose slowly makes a loss worse, but breaks no operation.
        if leap is None or found.cause is Cause.DATA:
            return found, None
        if not leap.is_sudden and (found.culprit is not None or found.cause is not Cause.EXPLOSION):
            return found, None
        if anomaly.signal not in (_OF_THE_RATE if leap.is_sudden else _OF_THE_LOSS):
            return found, None
        return by_rate(leap.factor, leap.step, is_sudden=leap.is_sudden), leap

    def _explained(
        self,
        anomaly: Anomaly,
        update: Update,
        refused: Refused | None,
        history: Sequence[Incident],
        reference: Reference | None,
        leap: Leap | None,
    ) -> Diagnosis:
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen[0] == anomaly.evidence:
            return foreseen[1]
        if anomaly.signal is Signal.EXCEPTION:
            failed = {one.row: str(one) for one in update.failed}
            return verdict.on_bad_rows({row: why for one in self._world.all_of(failed) for row, why in one.items()})
        if not anomaly.landed:
            found = None if refused is None else self._of_refused(anomaly, refused, history)
            return found or by_signal(anomaly)
        is_of_loss = anomaly.signal in _OF_THE_LOSS and not (leap and leap.is_sudden)
        found = self._samples_behind(anomaly, reference) if is_of_loss else None
        return found or self._damage(anomaly, history)

    def _of_refused(self, anomaly: Anomaly, refused: Refused, history: Sequence[Incident]) -> Diagnosis | None:
        start = refused.update.start
        if self._search is None:
            if anomaly.signal in _BY_LIMIT:
                return self._far_above([start])
            if anomaly.signal is not Signal.NONFINITE_BATCH:
                return None
            with randomness.preserved(self._world.device):  # fetching rows changes it
                return bad_rows_of(refused.update, self._samples, self._world)
        known = _known(anomaly, history)
        if known is not None and (confirmed := self._search.confirmed(known, refused)) is not None:
            return confirmed
        found = self._search.diagnose(anomaly, refused, self._passed.recent_measurements())
        if found is None or found.cause is not Cause.DATA or anomaly.signal not in _BY_LIMIT:
            return found
        more = self._far_above([start])  # those to come as well
        return found if more is None else replace(found, rows=tuple(sorted({*found.rows, *more.rows})))

    def _damage(self, anomaly: Anomaly, history: Sequence[Incident]) -> Diagnosis:
        """What became of the weights or moments: the worst that any rank has found."""
        verified = self._ring.verified_until(anomaly.since)
        before: Mapping[str, Any] = verified[0].parts["weights"] if verified else {}
        mine = damage.of_state(anomaly, dict(self._state.model.named_parameters()), before, self._optimizers)
        theirs = enumerate(self._world.all_of(mine))  # of a healthy rank it says what moved farthest in health
        to_ask = [one for rank, one in theirs if not anomaly.ranks or rank in anomaly.ranks]
        worst = max((one for one in to_ask if one is not None), key=lambda one: one.size, default=None)
        found = worst.diagnosis if worst is not None else by_signal(anomaly)
        if anomaly.signal is Signal.RANK_MISMATCH or found.cause is not Cause.CORRUPTION:
            return found  # with the same gradients every optimizer comes to the same weights
        recent = [one.anomaly for one in history[-_KNOWN_AFTER:] if one.anomaly.signal is anomaly.signal]
        if not any(one.since == anomaly.since for one in recent):
            return found
        # What breaks again at the same place, after the updates were retried, is no accident of the hardware.
        cause = Cause.EXPLOSION if damage.is_possible(anomaly) else Cause.OPTIMIZER
        return Diagnosis(cause, f"It came again at the same place after a rewind. {found.advice}")

    # Rows whose values are far above those of others.

    def foresee(self, vitals: Vitals, fed: Sequence[Any]) -> Anomaly | None:
        """Look for bad rows, once, where the gradients or the values of the first updates differ wildly.

        Clipped or normalized they hide there. They are to blame only where the updates that hold them go worse.
        """
        if vitals.step > _BEGUN or not vitals.accepted or not self._samples.rows:
            return None
        self._first_sizes[vitals.start] = by_rows.largest(fed)  # it stays on the device
        if vitals.step < _BEGUN:
            return None
        wildest, known = self._passed.wildest()
        by_rank = self._world.all_of(self._largest_of_first())  # each has values of its own
        suspects = dict.fromkeys([*(one.start for one in wildest), *(start for some in by_rank for start in some)])
        if not suspects or (found := self._far_above([*suspects], [one.start for one in known])) is None:
            return None
        if (seen := self._goes_worse(found, known)) is None:
            return None
        signal, evidence = seen
        self._foreseen = evidence, found
        return Anomaly(signal, vitals.step, vitals.tick, 0, evidence)

    def _largest_of_first(self) -> list[int]:
        """The places of the first updates that are far above others in some field, the largest last."""
        sizes = {start: one.tolist() for start, one in self._first_sizes.items()}
        self._first_sizes.clear()
        shape = len(next(iter(sizes.values()), []))
        if not shape or any(len(one) != shape for one in sizes.values()):
            return []
        least = [min(one[field] for one in sizes.values()) or math.inf for field in range(shape)]
        beyond = {start: max(map(truediv, one, least)) for start, one in sizes.items()}
        return sorted((start for start, times in beyond.items() if times > _FAR_ABOVE), key=beyond.__getitem__)[-FEW:]

    def _far_above(self, suspects: Sequence[int], also: Sequence[int] = ()) -> Diagnosis | None:
        """Look for rows whose values are far above those of others, in the updates at these positions.

        If there are some, `also` in others, and in samples ahead, so that they are not met one by one. It takes no
        replay, so it asks for much: it is for what can be explained by nothing else.
        """
        if not self._samples.rows or not suspects:
            return None

        def fetched(key: Key) -> Any:
            self._beat()
            try:
                return self._samples.fetched(key)
            except Exception:  # rows that cannot be fetched are met where they are trained on
                return None

        def keys_at(starts: Sequence[int]) -> list[Key]:
            return [key for start in starts for some in self._samples.keys_at(start) for key in some]

        with randomness.preserved(self._world.device):  # fetching rows changes it
            keys = keys_at(suspects)
            usual = by_rows.usual_sizes([fetched(key) for key in self._samples.others(keys[:_OTHERS], 0)])
            odd = {key.row: why for key in keys if (why := by_rows.far_above(fetched(key), usual, _FAR_ABOVE))}
            if not any(self._world.all_of(bool(odd))):
                return None
            for key in keys_at([*also, *self._samples.starts(max(suspects), _AHEAD)]):
                if why := by_rows.far_above(fetched(key), usual, _FAR_ABOVE):
                    odd[key.row] = why
        return verdict.on_bad_rows({row: why for one in self._world.all_of(odd) for row, why in one.items()})

    def _goes_worse(self, found: Diagnosis, known: Sequence[PastUpdate]) -> tuple[Signal, str] | None:
        """Whether the updates that hold rows are those that go wrong, and how that is seen; None where they are not.

        Where all losses fall at first, those that fall no further show in the later half.
        """
        in_order = sorted(known, key=lambda one: one.step)
        for updates in (in_order, in_order[len(in_order) // 2 :]):
            holds = [not {*found.rows}.isdisjoint(self._samples.rows_at(one.start, one.stop)) for one in updates]
            with_them = [one for one, is_one in zip(updates, holds, strict=True) if is_one]
            without = [one for one, is_one in zip(updates, holds, strict=True) if not is_one]
            if min(len(with_them), len(without)) < _TO_COMPARE:
                continue
            norm, usual_norm = (median(one.norm for one in some) for some in (with_them, without))
            if norm > WILD * usual_norm:
                what = f"gradient norms of {norm:.3g} with some rows, of {usual_norm:.3g} without them"
                return Signal.GRAD_SPIKE, what
            higher = sum(one.loss > other.loss for one in with_them for other in without)
            if higher > _CLEARLY * len(with_them) * len(without):
                loss, usual_loss = (median(one.loss for one in some) for some in (with_them, without))
                return Signal.LOSS_SPIKE, f"losses of {loss:.4g} with some rows, of {usual_loss:.4g} without them"
        return None

    # A loss above where it was, though nothing was refused.

    def _samples_behind(self, anomaly: Anomaly, reference: Reference | None) -> Diagnosis | None:
        """Say whether what was trained on since the last good state explains the loss; None if it may be the weights.

        Raises NoMeasure.
        """
        suspects = self._passed.around(anomaly.since)[0]
        odd = self._far_above([one.start for one in suspects])
        if odd is not None and (anomaly.since < _YOUNG or self._goes_worse(odd, self._passed.recent())):
            return odd
        verified = self._ring.verified_until(anomaly.since)
        if reference is None or not verified or not suspects:
            return None
        rise = max(one.loss for one in suspects) - reference.level
        if self._search is None or not self._samples.rows:
            first = suspects[0]
            is_at_once = first.step == verified[0].step + 1 and first.loss - reference.level > max(
                rise / 2, reference.size
            )
            return verdict.on_changed(reference.level, first.loss) if is_at_once else None
        trusted = self._passed.around(verified[0].step)[1]
        if not rise > 0 or not trusted:
            return None
        self._ring.settled()
        loss_at = self._search.loss_at
        with randomness.preserved(self._world.device):
            with self._state.weights_of(verified[0].parts):
                usual, was = median([loss_at(one.start) for one in trusted]), median(one.loss for one in trusted)
                if not usual - was > max(_EXPLAINS * rise, reference.size):
                    return self._compared(self._search, suspects, trusted, verified[0].step, rise, usual)
            for older in verified[1:]:  # is it the objective that has changed, or what was fed to it for a while?
                then = self._passed.next_after(older.step)
                if then is None:
                    continue
                with self._state.weights_of(older.parts):
                    is_as_it_was = abs(loss_at(then.start) - then.loss) <= _SAME * max(abs(then.loss), 1e-6)
                if is_as_it_was:
                    raise NoMeasure(
                        f"losses of {was:.4g} up to step {verified[0].step:,}, where the samples there "
                        f"have {usual:.4g} now"
                    )
        return verdict.on_changed(was, usual)

    def _compared(
        self,
        search: Search,
        suspects: Sequence[PastUpdate],
        trusted: Sequence[PastUpdate],
        step: int,
        rise: float,
        usual: float,
    ) -> Diagnosis | None:
        """Compare losses of suspects with the usual one of healthy updates, all at the weights of a verified `step`."""
        first = suspects[0]
        is_at_once = first.step == step + 1 and first.loss - usual > rise / 2  # it was high at these very weights
        if is_at_once and search.loss_at(first.start) - usual < _PART * rise:
            return verdict.TRANSIENT  # it is neither the samples nor the weights
        bad = [search.loss_at(one.start) for one in suspects]
        if not median(bad) - usual > _EXPLAINS * rise:  # of what is not finite, too
            return None
        worst = suspects[max(range(len(bad)), key=bad.__getitem__)].start
        rows = search.raising(worst, trusted[-1].start, usual + _PART * (max(bad) - usual))
        return verdict.on_misled(rows, usual, median(bad))


def _known(anomaly: Anomaly, history: Sequence[Incident]) -> Diagnosis | None:
    """The culprit of the last incidents, where they were like this one and only passed over."""
    last = history[-_KNOWN_AFTER:]
    first = last[0].diagnosis if len(last) == _KNOWN_AFTER else None
    if first is None or first.culprit is None:
        return None
    are_alike = all(
        one.anomaly.signal is anomaly.signal
        and anomaly.tick - one.anomaly.tick <= _KNOWN_FOR
        and kind_of(one.anomaly, one.diagnosis) == kind_of(anomaly, first)
        and is_mild(one.decision.actions)
        for one in last
    )
    return first if are_alike else None
