"""Why something happened: what rows, replays, the state, past updates and the learning rate say about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from operator import attrgetter, itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from resilient_train.core import randomness
from resilient_train.core.checks import Checks
from resilient_train.core.episode import Reference
from resilient_train.core.protocols import Diagnoser, NewRegime
from resilient_train.core.ring import Ring, Snapshot
from resilient_train.core.state import RunState, copy_pairs, is_pair
from resilient_train.core.transaction import Transaction, Update
from resilient_train.core.tree import Share, is_sharded, local_part
from resilient_train.data.history import FEW, LEARNED, Leap, PastUpdate, UpdateHistory
from resilient_train.data.samples import Samples
from resilient_train.data.stream import Key
from resilient_train.extensions.diagnosis import rows as by_rows
from resilient_train.extensions.diagnosis import verdict
from resilient_train.extensions.diagnosis.search import NONFINITE, Search
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
from resilient_train.parts.run import lost_eps
from resilient_train.processes.world import World

_OF_THE_RATE = (
    *OF_THE_LOSS,
    Signal.GRAD_SPIKE,
    Signal.NONFINITE_LOSS,
    Signal.NONFINITE_GRAD,
    Signal.NONFINITE_WEIGHTS,
    Signal.NONFINITE_OPTIMIZER,
)
_MIN_SHARE_OF_UPDATE = 0.5  # of a rise of the loss: samples that cause less of it are not to blame
_AHEAD = 2048  # samples ahead that are searched as well, once bad rows are found
_FAR_LOWER = 2.0  # times
_OF_KEPT = Diagnosis(Cause.CORRUPTION, fact("kept_not_finite"))  # it is no reason to change how the run learns
_LOSS = attrgetter("loss")
_FAR_ABOVE = 100.0  # times what three of four rows do not exceed


@dataclass
class Explainer(Diagnoser):
    """Finds the cause of an anomaly, trying the cheapest way first. Every rank makes each of these calls."""

    world: World
    samples: Samples
    state: RunState
    ring: Ring
    optimizers: Sequence[Optimizer]
    updates: UpdateHistory
    checks: Checks
    search: Search | None  # None if updates cannot be replayed
    beat: Callable[[], None]  # called when a diagnosis has made progress

    def __post_init__(self) -> None:
        self._leap: Leap | None = None  # of the learning rate, before the newest anomaly

    def trusted(self, signal: Signal, since: int, has_landed: bool) -> int:
        """Find out whether the learning rate rose lately. Updates that landed after a leap of it are not trusted."""
        self._leap = leap = self.updates.leap(since if has_landed else None)
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
        if anomaly.signal is Signal.EXCEPTION and any(failed := self.world.all_of(errors)):
            found = verdict.on_bad_rows(*failed)
        elif not anomaly.landed or anomaly.signal in NONFINITE:
            found = self._bad_rows(update) if anomaly.signal is Signal.NONFINITE_BATCH else None
            found = found or (self._of_refused(anomaly, refused) if refused is not None else None)
            found = found or by_signal(anomaly)
        elif anomaly.signal in OF_THE_LOSS and not is_sudden:
            self._require_same_regime(anomaly, self.checks.episode.reference)
        found = found or self._damage(anomaly, history)
        # Bad rows do not depend on the learning rate, and a slow rise of it makes no operation return NaN.
        may_be_leap = is_sudden or (found.culprit is None and found.cause is Cause.EXPLOSION)
        may_be_leap &= found.cause is not Cause.DATA and anomaly.signal in (_OF_THE_RATE if is_sudden else OF_THE_LOSS)
        if leap is not None and may_be_leap:
            times, before = leap.jump or leap.factor, leap.step - 1
            rose = fact("rate_rose", times=times, before=before, step=leap.step, is_sudden=is_sudden)
            to = leap.usual * leap.factor if leap.is_sudden else 0.0
            return Diagnosis(Cause.RATE, rose, usual_rate=leap.usual, leapt_to=to)
        return found

    def _of_refused(self, anomaly: Anomaly, refused: Transaction) -> Diagnosis | None:
        update, search = refused.update, self.search
        if anomaly.signal in SPIKES:
            self._require_old_losses(anomaly)
        found = search.diagnose(anomaly, refused, self.updates.recent_measurements()) if search is not None else None
        if anomaly.signal not in SPIKES or (search is not None and (found is None or found.cause is not Cause.DATA)):
            return found
        more = self._find_outlier_rows(update.start)  # those to come as well
        if found is None or more is None:
            return found or more
        return replace(found, rows=tuple(sorted({*found.rows, *more.rows})), reasons={**more.reasons, **found.reasons})

    def _bad_rows(self, update: Update) -> Diagnosis | None:
        """Find the rows whose values are not finite. This takes no replay."""
        keys = chain.from_iterable(update.keys) if self.samples.rows else ()
        with randomness.preserved(self.world.device):  # fetching rows changes it
            odd = self._odd_among(keys, lambda row: by_rows.nonfinite_fields(row)[:3])
        by_rank = self.world.all_of(odd)
        return verdict.on_bad_rows(*by_rank) if any(by_rank) else None

    def _damage(self, anomaly: Anomaly, history: Sequence[Incident]) -> Diagnosis:
        """What is wrong with weights or moments: the worst that any rank has found. Raises NewRegime."""
        if anomaly.signal is Signal.WEIGHTS_JUMP and not anomaly.ranks:
            self._require_worse_weights(anomaly)
        verified = self.ring.verified_until(anomaly.since)
        before: Mapping[str, Any] = verified[0].parts["weights"] if verified else {}
        mine = of_state(anomaly, dict(self.state.model.named_parameters()), before, self.optimizers)
        buffers = dict(self.state.model.named_buffers())
        if mine is None and anomaly.signal is Signal.NONFINITE_WEIGHTS and _worst(buffers, {}) is None:
            mine = 0.0, _OF_KEPT
        # A healthy rank also names the weight that moved most, so keep only the anomaly's ranks.
        theirs = enumerate(self.world.all_of(mine))
        blamed = [one for rank, one in theirs if one is not None and (not anomaly.ranks or rank in anomaly.ranks)]
        found = max(blamed, key=itemgetter(0))[1] if blamed else by_signal(anomaly)
        # With the same gradients every optimizer comes to the same weights on all ranks. What else breaks again at the
        # same place, after the updates were retried, is no accident of the hardware.
        may_be = found.cause is Cause.CORRUPTION and found != _OF_KEPT and anomaly.signal is not Signal.RANK_MISMATCH
        seen = {(one.anomaly.signal, one.anomaly.since) for one in history[-2:]}
        if may_be and (anomaly.signal, anomaly.since) in seen:
            return Diagnosis(Cause.OPTIMIZER, fact("again_after_rewind") + found.advice)
        return found

    def _find_outlier_rows(self, start: int) -> Diagnosis | None:
        """Look in an update for rows whose values are far above those of others, then also in those to come. Without a
        replay they have to be very large: nothing else can explain them.
        """
        if not self.samples.rows:
            return None
        with randomness.preserved(self.world.device):  # fetching rows changes it
            keys = [*chain.from_iterable(self.samples.keys_at(start))]
            others = self.samples.others(keys[: by_rows.OTHERS], 0, least=by_rows.ENOUGH)
            usual = by_rows.usual_sizes([self._fetched(key) for key in others])
            far_above = partial(by_rows.far_above, usual=usual, times=_FAR_ABOVE)
            odd = self._odd_among(keys, far_above)
            if not any(self.world.all_of(bool(odd))):
                return None
            for ahead in self.samples.starts(start, _AHEAD):
                odd |= self._odd_among(chain.from_iterable(self.samples.keys_at(ahead)), far_above)
        return verdict.on_bad_rows(*self.world.all_of(odd))

    def _fetched(self, key: Key) -> Any:
        self.beat()
        return self.samples.fetched(key)

    def _odd_among(self, keys: Iterable[Key], says: Callable[[Any], Facts]) -> dict[int, Facts]:
        found = ((key.row, says(self._fetched(key))) for key in keys)
        return {row: why for row, why in found if why}

    def _require_same_regime(self, anomaly: Anomaly, reference: Reference | None) -> None:
        """Raise NewRegime if the samples since the last good state, or those before it, explain a risen loss."""
        suspects, verified = self.updates.around(anomaly.since)[0], self.ring.verified_until(anomaly.since)
        trusted = self.updates.around(verified[0].step)[1] if verified else []
        if self.search is None or not self.samples.rows or reference is None or not suspects or not trusted:
            return
        live, was = (median(map(_LOSS, some)) for some in (suspects, trusted))
        rise = live - reference.level
        if not rise > 0:
            return
        loss_at = self.search.loss_at
        with self._weights_of(verified[0]):
            usual = median(loss_at(one.start) for one in trusted)
            self._require_same_losses(trusted, was, rise)
            others = sorted(loss_at(one.start, of_others=True) for one in trusted)
            unlearned, high = others[len(others) // 2], others[max(0, len(others) - 2)]  # one may hold bad rows
            if unlearned - usual > max(_MIN_SHARE_OF_UPDATE * rise, reference.size):
                raise NewRegime(fact("just_learned", was=was, step=verified[0].step, others=unlearned))
            now = median(loss_at(one.start) for one in suspects)
            if not now - usual > _MIN_SHARE_OF_UPDATE * rise or high >= now:
                return  # also where the loss is not finite
            # At the weights that have learned them, or were made for them.
            is_new = live - usual < _MIN_SHARE_OF_UPDATE * (now - usual)
            if not is_new:
                ahead = self.samples.starts(suspects[-1].start, _AHEAD)
                later = [loss_at(start) for start in ahead[:: max(1, len(ahead) // FEW)]]
                is_new = bool(later) and min(later) - usual > _MIN_SHARE_OF_UPDATE * rise
        if is_new:  # the data is like that from here on
            what = fact("risen_at_verified", was=usual, now=now, is_of_later=True)
            raise NewRegime(what, usual + LEARNED * (now - usual), is_on_purpose=True)

    @contextmanager
    def _weights_of(self, snapshot: Snapshot) -> Iterator[None]:
        """Use the weights and buffers of a snapshot, and nothing else of it."""
        self.ring.copier.wait()
        buffers, saved = self.state.model.named_buffers(), snapshot.parts["buffers"]
        pairs = self.state.pairs(snapshot.parts["weights"])
        pairs += [(buffer, saved[name]) for name, buffer in buffers if is_pair(buffer, saved.get(name))]
        now = [(live, local_part(live).detach().clone()) for live, _ in pairs]
        with randomness.preserved(self.world.device):
            copy_pairs(pairs)
            try:
                yield
            finally:
                copy_pairs(now)

    def _require_same_losses(self, trusted: Sequence[PastUpdate], was: float, rise: float) -> None:
        """Raise NewRegime if samples have lost the loss of these weights: no update or rate can do that."""
        assert self.search is not None
        with self.samples.as_of_now():
            risen = [self.search.loss_at(one.start) - one.loss for one in trusted]
        if median(risen) > _MIN_SHARE_OF_UPDATE * rise:
            raise NewRegime(fact("risen_at_verified", was=was, now=was + rise), is_on_purpose=True)

    def _require_old_losses(self, refused: Anomaly) -> None:
        """Raise NewRegime if at verified weights a refused update has company: samples from before it."""
        verified = self.ring.verified_until(refused.since)
        trusted = self.updates.around(verified[0].step)[1] if verified else []
        if self.search is None or not self.samples.rows or not trusted:
            return
        now, was = self.updates.recent_measurements()[0][-1], median(map(_LOSS, trusted))
        if now - was > _MIN_SHARE_OF_UPDATE * abs(was):
            with self._weights_of(verified[0]):
                self._require_same_losses(trusted, was, now - was)

    def _require_worse_weights(self, jump: Anomaly) -> None:
        """Raise NewRegime if the loss fell far from one update to the next, as it does by no damage."""
        newest, before = self.updates.around(jump.since)
        losses = [*map(_LOSS, (*before, *newest))]
        for place in range(2, len(losses) - 1):
            earlier, later = losses[:place], losses[place:]
            if 0 <= _FAR_LOWER * max(later) < min(earlier):
                was = median(earlier)
                raise NewRegime(fact("fell", was=was, now=median(later)), was, is_on_purpose=True)


def of_state(
    anomaly: Anomaly,
    weights: Mapping[str, Tensor],
    before: Mapping[str, Tensor | Share],
    optimizers: Sequence[Optimizer],
) -> tuple[float, Diagnosis] | None:
    """Say what is wrong on this rank, and how bad it is; `before` are weights of a verified state, if there is one."""
    if anomaly.signal in (Signal.NONFINITE_WEIGHTS, Signal.NONFINITE_OPTIMIZER) and (lost := lost_eps(optimizers)):
        return inf, Diagnosis(Cause.OPTIMIZER, lost)
    is_jump = anomaly.signal is Signal.WEIGHTS_JUMP
    if not is_jump and anomaly.signal is not Signal.NONFINITE_WEIGHTS:
        return None
    if (worst := _worst(weights, before if is_jump else {})) is None:
        return None
    far, found = worst
    what = fact("weight_moved" if is_jump else "weight_not_finite", **found, step=anomaly.step)
    return far, Diagnosis(Cause.CORRUPTION, what)


@torch.no_grad()
def _worst(weights: Mapping[str, Tensor], before: Mapping[str, Tensor | Share]) -> tuple[float, dict[str, Any]] | None:
    """Find the element that is farthest from what it was before, if that is known; one that is not finite is so."""
    farthest, found = 0.0, None
    for name, whole in weights.items():
        weight = local_part(whole)
        if not weight.is_floating_point() or not weight.numel():
            continue
        was = local_part(before[name]).to(weight.device) if name in before else weight
        far, flat = (weight - was).abs().nan_to_num(inf).flatten().max(dim=0)
        if float(far) > farthest:
            farthest, place = float(far), [int(one) for one in torch.unravel_index(flat, weight.shape)]
            values = {"before": float(was[tuple(place)]), "now": float(weight[tuple(place)])}
            found = farthest, {"name": name, "at": [] if is_sharded(whole) else place, **values}
    return found
