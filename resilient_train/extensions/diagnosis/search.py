"""Searches for the cause of a refused update: replays, other rows as a control, the microscope, the rows.

A forward may hold collectives: all ranks make the same calls here in the same order, with batches of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from resilient_train.core import randomness
from resilient_train.core.transaction import Transaction
from resilient_train.core.vitals import versions
from resilient_train.data.samples import Samples
from resilient_train.data.stream import Key
from resilient_train.extensions.diagnosis import rows as by_rows
from resilient_train.extensions.diagnosis import verdict
from resilient_train.extensions.diagnosis.microscope import Origin
from resilient_train.extensions.diagnosis.replay import Replay, Replayed
from resilient_train.extensions.diagnosis.verdict import Observations
from resilient_train.ground.errors import text_of
from resilient_train.ground.types import SPIKES, Anomaly, Cause, Culprit, Diagnosis, Facts, Signal, fact
from resilient_train.processes.world import World

_CONTROLS = 4  # draws of other rows at most, where the first ones break as well
_RARE = 100  # rows that pass an operation, for each that does not: then it is not the line; and the most to blame
_FEW, _MOST_DRAWS = 4, 32  # rows of an update, and draws of others, that are tried for that
_FAR = 4.0  # times the largest of those: what makes a gradient jump is an outlier
_ABSURD = 1e4  # the same where an operation broke: one that cannot take a large value is to blame itself
NONFINITE = (Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD, Signal.NONFINITE_BATCH)

History = Sequence[Sequence[float]]  # losses, and gradient norms: of the updates before, then of the refused one
Keys = Sequence[Sequence[Key]]  # of the micro-batches of an update

T = TypeVar("T")


@dataclass
class Search:
    """Finds the culprit of an update that was refused. Every rank gets the same answer."""

    replay: Replay
    samples: Samples
    world: World
    beat: Callable[[], None]  # called after every replay: a search takes longer than the watchdog allows an update
    tried: set[tuple[str, int, str]]  # operations that were patched, or cannot be

    def diagnose(self, anomaly: Anomaly, refused: Transaction, history: History) -> Diagnosis | None:
        if anomaly.signal not in (*NONFINITE, *SPIKES, Signal.EXCEPTION):
            return None
        is_spike = anomaly.signal in SPIKES
        with randomness.preserved(self.world.device):  # fetching rows changes them
            by_rank = self.world.all_of(self._observe(refused, is_spike))
        seen = replace(verdict.merge_ranks(by_rank), landed=anomaly.step - 1)
        if not seen.reproduced:
            why = fact("not_replayed", why=[*seen.failure])
            return Diagnosis(Cause.UNKNOWN, why) if seen.failure else verdict.TRANSIENT
        now = max(map(verdict.climbed, history))
        rules: Sequence[verdict.Rule] = verdict.NOT_FINITE
        if refused.is_error:
            rules, seen = verdict.ERRORS, replace(seen, error=str(anomaly.evidence[0].get("text")))
        elif is_spike:
            before = max(verdict.climbed(one[:-1]) for one in history)
            rules, seen = verdict.SPIKES, replace(seen, climb=before, leap=now)
        else:
            seen = replace(seen, climb=now, leap=verdict.climbed(history[0]))
        found = verdict.rule_for(rules, seen).answer(seen)
        ranks = tuple(rank for rank, one in enumerate(by_rank) if one.reproduced)
        return replace(found, ranks=ranks if len(ranks) < self.world.size else ())

    def loss_at(self, start: int, *, of_others: bool = False) -> float:
        """The mean loss over ranks of the update at a position, or of rows that the run may not have learned yet."""

        def made() -> Sequence[Any]:
            keys = self.samples.keys_at(start)
            return self._made(keys, self._others(keys, 0) if of_others else chain(*keys))

        tried = self._tried(start, made, self.replay.of)
        losses = [one for one in self.world.all_of(None if tried.failure else tried.loss) if one is not None]
        return sum(losses) / len(losses) if losses else math.nan

    # The replays. Every rank makes each of them.

    def _observe(self, refused: Transaction, is_spike: bool) -> Observations:
        first = self._replayed(refused)
        reproduced = not first.failure and _would_refuse(refused, first.loss, first.norm)
        if not any(self.world.all_of(reproduced)):
            return Observations(failure=first.failure)
        filler, is_compared = self._control(refused)
        facts = Observations(
            reproduced=reproduced,
            everywhere=is_compared and filler is None,
            is_compared=is_compared,
            failure=first.failure,
        )
        origin: Origin | None = None
        if not is_spike:
            origin = self._replayed(refused, watched=True).origin
            is_bad = not refused.nan_is_usual and any(map(by_rows.nonfinite_fields, refused.inputs))
            facts = replace(facts, batch_is_bad=is_bad, size=first.norm)
        if origin is not None:
            is_tried = _where((origin.after or origin).culprit) in self.tried
            facts = replace(origin.noted(facts), is_tried=is_tried)
        is_sharded = self.replay.is_sharded
        found = self._guilty(refused, filler if reproduced or is_sharded else None)
        if is_sharded:  # the gradient is of all ranks' rows: all ranks reproduce it unless some rank's rows are known
            reproduced = bool(found or origin) or not (first.failure or _allows_loss(refused, first.loss))
            is_known = any(self.world.all_of(reproduced))
            facts = replace(facts, reproduced=reproduced or not is_known)
        others = self._others_that_pass(refused, found, origin)
        if not refused.update.keys and origin is None:
            return replace(facts, failure=fact("rows_without_names"))
        if not found or filler is None:
            return facts
        odd = self._odd(found, filler, _ABSURD if facts.culprit else _FAR, refused.nan_is_usual)
        rows = tuple(sorted({key.row for key in found}))
        passed = self.samples.have_passed(found)
        return replace(facts, rows=rows, odd=odd, others=others, have_passed=passed)

    def _control(self, refused: Transaction) -> tuple[list[Key] | None, bool]:
        """Replay other rows at the same weights; return a healthy draw of them, and whether any was replayed."""
        filler: list[Key] | None = None
        is_compared = False
        if not any(self.world.all_of(bool(refused.update.keys))):
            return None, False
        for draw in range(_CONTROLS):
            others = self._others(refused.update.keys, draw)
            tried = self._replayed(refused, others)
            is_compared |= not tried.failure
            if filler is None and not _would_refuse(refused, tried.loss, tried.norm):
                filler = others
            if all(self.world.all_of(filler is not None)):
                break
        return filler, is_compared

    def _others_that_pass(self, refused: Transaction, found: Sequence[Key], origin: Origin | None) -> int:
        """How many others were tried where rows alone break an operation of data, and hardly any other does; else 0."""
        keys = refused.update.keys
        is_rare = origin is not None and self._may_be_rare(keys, found, origin)
        others, draw, count = set[int](), _CONTROLS, len(found) if is_rare else 0
        most = count + (2 * sum(map(len, keys)) <= _RARE)  # of a large draw many rows may break
        while any(self.world.all_of(len(others) < _RARE * count <= _RARE * most)) and draw < _MOST_DRAWS:
            drawn = self._others(keys, draw)
            tried = self._replayed(refused, drawn)
            count, draw = count + (is_rare and _would_refuse(refused, tried.loss, tried.norm)), draw + 1
            others.update(key.row for key in drawn)
        return len(others) if is_rare and len(others) >= _RARE * count and count <= most else 0

    def _may_be_rare(self, keys: Keys, found: Sequence[Key], origin: Origin) -> bool:
        if origin.after or not origin.is_of_data or not 0 < len(found) <= _FEW:
            return False
        reached = max((math.prod(one["shape"]) for one in origin.inputs), default=0)
        if reached < min(map(len, keys), default=0):  # hardly any row has got to that line
            return False
        known = {key.row for key in found} | self.samples.stream.quarantined
        is_few = _RARE * len(known) <= min(self.samples.rows, _RARE * _RARE)
        is_tried = _where(origin.culprit) in self.tried
        return is_few and not is_tried and not self.samples.have_passed(found)

    def _guilty(self, refused: Transaction, filler: Sequence[Key] | None) -> list[Key]:
        """Search a batch for rows each of which breaks a healthy one, the filler; ranks without one replay as well.

        If it cannot be replayed no row is to blame. Sharded ranks search one batch together: a gradient is that of all.
        """
        together = self.replay.is_sharded
        keys = [*chain(*refused.update.keys)]
        first, count = 0, len(keys) if filler is not None else 0
        if together:
            counts = self.world.all_of(count)
            first, count = sum(counts[: self.world.rank]), sum(counts) if all(counts) else 0
        search = by_rows.guilty(count)
        asked = next(search, None) if count else None
        found: Sequence[int] = ()
        while any(self.world.all_of(asked is not None)):
            mine = {place - first for place in asked or ()}
            mixed = [keys[place] if place in mine else other for place, other in enumerate(filler or ())]
            tried = self._replayed(refused, mixed or None)
            is_broken = not tried.failure and _would_refuse(refused, tried.loss, tried.norm)
            if together:
                is_broken = any(self.world.all_of(is_broken))
            if asked is None:
                continue
            try:
                asked = None if tried.failure and not together else search.send(is_broken)
            except StopIteration as end:
                found, asked = end.value, None
        return [key for place, key in enumerate(keys, first) if place in found]

    def _replayed(self, refused: Transaction, keys: Sequence[Key] | None = None, *, watched: bool = False) -> Replayed:
        """Replay a refused update, or other rows in the places of its own."""
        was_modified = refused.versions != [versions(batch) for batch in refused.inputs]  # its batches, in place

        def made() -> Sequence[Any]:
            if keys is not None or (was_modified and refused.update.keys):
                return self._made(refused.update.keys, keys or chain(*refused.update.keys))
            if was_modified:
                raise RuntimeError("the batch was changed in place during its update, and it cannot be fetched again")
            return [self.world.on_device(batch) for batch in refused.inputs]

        replay = self.replay.under_microscope if watched else self.replay.of
        replay = partial(replay, attributes=self.replay.attributes.before(refused.mark))
        return self._tried(refused.update.start, made, replay, takes_errors=refused.is_error)

    def _tried(
        self,
        start: int,
        make: Callable[[], Sequence[Any]],
        replay: Callable[[Sequence[Any], int], Replayed],
        *,
        takes_errors: bool = False,
    ) -> Replayed:
        """Make batches and replay them. An exception is a failure, or `takes_errors`: a measurement like others."""
        measured: Replayed | None = None
        made, why = _attempted(make)
        # Where ranks wait for each other in a forward, all make one, or none does.
        if self.replay.is_sharded and not all(self.world.all_of(made is not None)):
            made, why = None, why or fact("other_rank_failed")
        if made is not None:
            measured, why = _attempted(partial(replay, made, start))
            if measured is not None and measured.raised and not takes_errors:
                why, measured = fact("text", text=measured.raised), None
        self.beat()
        return measured or Replayed(math.nan, 0.0, {}, failure=why)

    def _made(self, batches: Keys, keys: Iterable[Key]) -> Sequence[Any]:
        left = iter(keys)
        return [self.world.on_device(self.samples.collated([*islice(left, len(some))])) for some in batches]

    def _others(self, batches: Keys, draw: int) -> list[Key]:
        return [key for some in batches for key in self.samples.others(some, draw)]

    def _odd(self, guilty: Sequence[Key], filler: Sequence[Key], far: float, nan_is_usual: bool) -> dict[int, Facts]:
        known = [*filler[: by_rows.OTHERS]]
        known += self.samples.others(guilty, 0, least=by_rows.ENOUGH) if len(known) < by_rows.ENOUGH else []
        others = [self.samples.fetched(key) for key in known]
        found = {}
        for key in guilty:
            row = self.samples.fetched(key)
            odd = () if nan_is_usual else by_rows.nonfinite_fields(row)
            if odd := odd or by_rows.outlying_fields(row, others, far):
                found[key.row] = odd[:3]
        return found


def _allows_loss(refused: Transaction, loss: float) -> bool:
    return -math.inf < loss <= refused.limits[0]


def _would_refuse(refused: Transaction, loss: float, norm: float) -> bool:
    return not (_allows_loss(refused, loss) and norm <= refused.limits[1])


def _where(culprit: Culprit) -> tuple[str, int, str]:
    return culprit.file, culprit.line, culprit.op


def _attempted(function: Callable[[], T]) -> tuple[T | None, Facts]:
    try:
        return function(), ()
    except Exception as error:
        return None, fact("text", text=f"{type(error).__name__}: {text_of(error)}".splitlines()[0])
