"""Why something happened: what rows, replays, the state, past updates and the learning rate say about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from math import inf
from operator import attrgetter, itemgetter
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from resilient_train.core import randomness
from resilient_train.core.protocols import Diagnoser, NewRegime
from resilient_train.core.ring import Snapshot
from resilient_train.core.state import copy_pairs, is_pair
from resilient_train.core.transaction import Transaction, Update
from resilient_train.core.tree import Share, is_sharded, local_part
from resilient_train.data.history import Leap
from resilient_train.extensions import Extension
from resilient_train.extensions.diagnosis import rows as by_rows
from resilient_train.extensions.diagnosis import verdict
from resilient_train.extensions.diagnosis.search import NONFINITE, Replay, Search
from resilient_train.ground.types import (
    OF_THE_LOSS,
    SPIKES,
    Anomaly,
    Cause,
    Diagnosis,
    Facts,
    Incident,
    Signal,
    by_signal,
    fact,
)
from resilient_train.parts.run import Run, lost_eps

_OF_THE_RATE = (
    *OF_THE_LOSS,
    Signal.GRAD_SPIKE,
    Signal.NONFINITE_LOSS,
    Signal.NONFINITE_GRAD,
    Signal.NONFINITE_WEIGHTS,
    Signal.NONFINITE_OPTIMIZER,
)
_MIN_SHARE = 0.5  # of a rise of the loss: what causes less of it is not to blame
_FAR_LOWER = 2.0  # times
_LOOK = 5.0  # seconds for a look through all rows, for those that are like bad ones
_TRIED = 4  # of these, or a few more: whether they break a batch
_LOSS = attrgetter("loss")


class CauseFinder(Extension, Diagnoser):
    """Finds the cause of an anomaly, trying the cheapest way first. Every rank makes each of these calls."""

    def build(self, run: Run) -> None:
        self._run, run.diagnoser = run, self
        self._leap: Leap | None = None  # of the learning rate, before the newest anomaly
        self._search: Search | None = None  # None if updates cannot be replayed
        backend, objective = run.backend, run.backend.objective
        if objective is None:
            return
        replay = Replay(
            backend.bare,
            measure=lambda model, batch: objective.for_training(model, batch)[0],
            backward=backend.backward,
            marks=run.marks,
            attributes=backend.attributes,
            seeds=run.seeds,
            device=run.world.device,
            drop_gradients=run.updater.drop_gradients,
            trained=run.updater.weights,
            over_ranks=run.world.norm,
            is_patched=lambda file, line, op: run.is_patched(file, line, op),
        )
        self._search = Search(run, replay)

    def trusted(self, signal: Signal, since: int, has_landed: bool) -> int:
        """Find out whether the learning rate rose lately. Updates that landed after a leap of it are not trusted."""
        self._leap = leap = self._run.updates.leap(since if has_landed else None)
        if leap is None or not leap.is_sudden or signal not in _OF_THE_RATE:
            return since
        return min(since, max(0, leap.step - 1))

    def explain(
        self, anomaly: Anomaly, update: Update, refused: Transaction | None, history: Sequence[Incident]
    ) -> Diagnosis:
        """Return the cause; that may be what `trusted` has found. Raises NewRegime."""
        leap = self._leap
        is_sudden = leap is not None and leap.is_sudden
        found: Diagnosis | None = None
        errors = {one.row: fact("text", text=one.error) for one in update.failed}  # of rows that could not be fetched
        if anomaly.signal is Signal.EXCEPTION and any(failed := self._run.world.all_of(errors)):
            found = verdict.on_bad_rows(*failed)
        elif not anomaly.landed or anomaly.signal in NONFINITE:
            found = self._bad_rows(update) if anomaly.signal is Signal.NONFINITE_BATCH else None
            if refused is not None and anomaly.signal in SPIKES:
                self._require_same_losses(anomaly, self._run.updates.recent_measurements()[0][-1])
            if found is None and refused is not None and self._search is not None:
                found = self._search.diagnose(anomaly, refused)
            found = found or by_signal(anomaly)
        elif anomaly.signal in OF_THE_LOSS and not is_sudden and self._run.checks.episode.reference is not None:
            losses = [*map(_LOSS, self._run.updates.around(anomaly.since)[0])]
            if losses:
                self._require_same_losses(anomaly, median(losses), self._run.checks.episode.reference.level)
        found = found or self._damage(anomaly, history)
        # Bad rows do not depend on the learning rate, and a slow rise of it makes no operation return NaN.
        may_be_leap = is_sudden or (found.culprit is None and found.cause is Cause.EXPLOSION)
        may_be_leap &= found.cause is not Cause.DATA and anomaly.signal in (_OF_THE_RATE if is_sudden else OF_THE_LOSS)
        if leap is not None and may_be_leap:
            rose = fact("rate_rose", times=leap.factor, before=leap.step - 1, step=leap.step, is_sudden=is_sudden)
            to = leap.usual * leap.factor if leap.is_sudden else 0.0
            return Diagnosis(Cause.RATE, rose, usual_rate=leap.usual, leapt_to=to)
        return self._with_alike(found, refused)

    def _with_alike(self, found: Diagnosis, refused: Transaction | None) -> Diagnosis:
        """Add the rows with the marks of those that were found, if some of them break a batch, too: one fault is one
        incident. Not beyond the budget.
        """
        run, samples = self._run, self._run.samples
        marks = [mark for advice in found.reasons.values() for mark in advice[0].get("why", ()) if "field" in mark]
        if not marks or refused is None or self._search is None:
            return found
        allowed = run.policy.budget.rows_of(samples.rows) - samples.quarantined
        until, reasons, start = monotonic() + _LOOK, dict[int, Facts](), max(found.rows)
        with randomness.preserved(run.world.device):
            for place in range(start, start + samples.rows)[run.world.rank :: run.world.size]:
                run.beat()
                key = refused.update.keys[0][0]._replace(row=place % samples.rows)
                if monotonic() > until:
                    break
                if key.row not in samples.stream.quarantined and (why := by_rows.alike(samples.fetched(key), marks)):
                    reasons[key.row] = fact("bad_rows", rows=[key.row], why=why[:3])
            for more in run.world.all_of(reasons):
                reasons |= more
            others = sorted(reasons.keys() - {*found.rows})
            reasons |= found.reasons
            if len(reasons) > allowed or not self._search.each_breaks(refused, others[:: len(others) // _TRIED + 1]):
                return found
        rows = tuple(sorted(reasons))
        first = {**reasons[rows[0]][0], "rows": [*rows]}
        return replace(found, rows=rows, reasons=reasons, advice=(first, *found.advice[1:]))

    def _bad_rows(self, update: Update) -> Diagnosis | None:
        """Find the rows whose values are not finite. This takes no replay."""
        odd = {}
        with randomness.preserved(self._run.world.device):  # fetching rows changes it
            for key in chain.from_iterable(update.keys) if self._run.samples.rows else ():
                self._run.beat()
                if why := by_rows.nonfinite_fields(self._run.samples.fetched(key)):
                    odd[key.row] = why[:3]
        by_rank = self._run.world.all_of(odd)
        return verdict.on_bad_rows(*by_rank) if any(by_rank) else None

    def _damage(self, anomaly: Anomaly, history: Sequence[Incident]) -> Diagnosis:
        """What is wrong with weights or moments: the worst that any rank has found. Raises NewRegime."""
        run, signal = self._run, anomaly.signal
        is_jump, found = signal is Signal.WEIGHTS_JUMP, by_signal(anomaly)
        if is_jump and not anomaly.ranks:
            self._require_worse_weights(anomaly)
        may_be_eps = signal in (Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER)
        if may_be_eps and (lost := lost_eps(run.updater.optimizers)):
            return Diagnosis(Cause.OPTIMIZER, lost)
        verified = run.ring.verified_until(anomaly.since) if is_jump else []
        if is_jump or signal is Signal.NONFINITE_WEIGHTS:
            before: Mapping[str, Any] = verified[0].parts["weights"] if verified else {}
            by_rank = run.world.all_of(worst_weight(dict(run.state.model.named_parameters()), before))
            # A healthy rank also names the weight that moved most, so keep only the anomaly's ranks.
            far, worst = max((by_rank[rank] for rank in anomaly.ranks or range(len(by_rank))), key=itemgetter(0))
            if far > 0:
                kind = "weight_moved" if is_jump else "weight_not_finite"
                found = Diagnosis(Cause.CORRUPTION, fact(kind, **worst, step=anomaly.step))
        # With the same gradients every optimizer comes to the same weights on all ranks. Other weights that break again
        # at the same place, after the updates were retried, are no accident of the hardware.
        seen = {(one.anomaly.signal, one.anomaly.since) for one in history[-2:]}
        if found.cause is Cause.CORRUPTION and signal is not Signal.RANK_MISMATCH and (signal, anomaly.since) in seen:
            return Diagnosis(Cause.OPTIMIZER, fact("again_after_rewind") + found.advice)
        return found

    def _require_same_losses(self, anomaly: Anomaly, now: float, level: float | None = None) -> None:
        """Raise NewRegime if samples have lost their loss at the weights that they had it with: no update or rate can
        do that. `now` is a loss far above the `level`, by default that of those samples.
        """
        samples, verified = self._run.samples, self._run.ring.verified_until(anomaly.since)
        trusted = self._run.updates.around(verified[0].step)[1] if verified else []
        if self._search is None or not samples.rows or not trusted:
            return
        was = median(map(_LOSS, trusted))
        rise = now - (was if level is None else level)
        if not rise > (_MIN_SHARE * abs(was) if level is None else 0):
            return
        with self._weights_of(verified[0]):
            risen = [self._search.loss_at(one.start) - one.loss for one in trusted]
        if median(risen) > _MIN_SHARE * rise:
            raise NewRegime(fact("risen_at_verified", was=was, now=was + rise))

    @contextmanager
    def _weights_of(self, snapshot: Snapshot) -> Iterator[None]:
        """Use the weights and buffers of a snapshot, and nothing else of it."""
        self._run.ring.copier.wait()
        buffers, saved = self._run.state.model.named_buffers(), snapshot.parts["buffers"]
        pairs = self._run.state.pairs(snapshot.parts["weights"])
        pairs += [(buffer, saved[name]) for name, buffer in buffers if is_pair(buffer, saved.get(name))]
        now = [(live, local_part(live).detach().clone()) for live, _ in pairs]
        with randomness.preserved(self._run.world.device):
            copy_pairs(pairs)
            try:
                yield
            finally:
                copy_pairs(now)

    def _require_worse_weights(self, jump: Anomaly) -> None:
        """Raise NewRegime if the loss fell far from one update to the next, as it does by no damage."""
        newest, before = self._run.updates.around(jump.since)
        losses = [*map(_LOSS, (*before, *newest))]
        for place in range(2, len(losses) - 1):
            earlier, later = losses[:place], losses[place:]
            if 0 <= _FAR_LOWER * max(later) < min(earlier):
                raise NewRegime(fact("fell", was=median(earlier), now=median(later)), median(earlier))


@torch.no_grad()
def worst_weight(
    weights: Mapping[str, Tensor], before: Mapping[str, Tensor | Share]
) -> tuple[float, Mapping[str, Any]]:
    """Find the element that is farthest from what it was before, if that is known; one that is not finite is so."""
    farthest, found = 0.0, dict[str, Any]()
    for name, whole in weights.items():
        weight = local_part(whole)
        if not weight.is_floating_point() or not weight.numel():
            continue
        was = local_part(before[name]).to(weight.device) if name in before else weight
        far, flat = (weight - was).abs().nan_to_num(inf).flatten().max(dim=0)
        if float(far) > farthest:
            farthest, place = float(far), [int(one) for one in torch.unravel_index(flat, weight.shape)]
            found = {"name": name, "at": [] if is_sharded(whole) else place}
            found |= {"before": float(was[tuple(place)]), "now": float(weight[tuple(place)])}
    return farthest, found
