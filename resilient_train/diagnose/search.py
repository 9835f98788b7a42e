"""Searches for what is behind an incident: replays, a control, the microscope, the rows.

All ranks search in step: whatever one of them replays, the others replay something as well, because a forward may hold
collectives. So every rank takes the same turns here, and what is local is which batch it looks at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from resilient_train.data.samples import Samples, Update
from resilient_train.data.stream import Key
from resilient_train.diagnose import rows as by_rows
from resilient_train.diagnose import verdict
from resilient_train.diagnose.microscope import Birth, Seen
from resilient_train.diagnose.replay import Replay, Replayed
from resilient_train.diagnose.verdict import Facts
from resilient_train.errors import text_of
from resilient_train.ranks.world import World
from resilient_train.state import randomness
from resilient_train.types import Anomaly, Culprit, Diagnosis, Signal

_CONTROLS = 4  # draws of other rows at most, where the first ones break as well
_OTHERS = 128  # rows that a row is compared with
_FAR = 4.0  # times the largest of those: what makes a gradient jump is an outlier
_ABSURD = 1e4  # the same where an operation broke: one that cannot take a large value is to blame itself
UNHEARD_OF = 100.0  # times what three of four rows do not exceed
_NONFINITE = (Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD, Signal.NONFINITE_BATCH)
_SPIKES = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)

History = Sequence[
    Sequence[float]
]  # losses, and gradient norms: of the updates before, and of the one that was refused
Keys = Sequence[Sequence[Key]]  # of the micro-batches of an update


@dataclass(frozen=True, slots=True)
class Refused:
    """An update that the gate refused: all that its replay takes."""

    update: Update
    fed: Sequence[Any]  # its micro-batches as the model saw them
    limits: tuple[float, float]  # of the gate, for loss and gradient norm
    is_spent: bool = False  # the objective has written into its batches: as they were they are no more
    nan_is_usual: bool = False  # in the batches of this run


class Search:
    """Finds the culprit of an update that was refused. Every rank learns the same."""

    def __init__(
        self,
        replay: Replay,
        samples: Samples,
        world: World,
        on_device: Callable[[Any], Any],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`beat` is called behind every replay, whose number is limited: a search takes longer than an update may."""
        self.armored = replay.armored
        self._replay, self._samples, self._world, self._on_device = replay, samples, world, on_device
        self._beat = beat

    def diagnose(self, anomaly: Anomaly, refused: Refused, history: History) -> Diagnosis | None:
        """Say what was behind it; None where nothing can be said beyond the signal."""
        if anomaly.signal not in (*_NONFINITE, *_SPIKES):
            return None
        with randomness.preserved(self._world.device):  # to fetch rows leaves them anywhere
            return self._diagnosed(anomaly, refused, history)

    def confirmed(self, known: Diagnosis, refused: Refused) -> Diagnosis | None:
        """Say the same again if it broke where it broke before: one look, and nothing else is tried."""
        with randomness.preserved(self._world.device):
            seen, first = self._seen(refused)
        birth = None if first is None else self._birth(seen, first)
        culprit = None if birth is None else _culprit(birth, seen)
        theirs = {rank: one for rank, one in enumerate(self._world.all_of(culprit)) if one is not None}
        broken = known.broken
        if not theirs or broken is None or _place(next(iter(theirs.values()))) != _place(broken):
            return None
        return replace(verdict.again(known), ranks=self._some(theirs))

    def loss_at(self, start: int) -> float:
        """The mean loss over ranks of the update at a position, at the weights as they are."""
        tried, _ = self._with(
            lambda: self._made(self._samples.keys_at(start)), lambda made: self._replay.of(made, start)
        )
        told = [one for one in self._world.all_of(None if tried is None else tried.loss) if one is not None]
        return sum(told) / len(told) if told else math.nan

    def raising(self, start: int, other: int, limit: float) -> tuple[int, ...]:
        """The rows of an update that alone raise the loss beyond a limit, with rows of another one in the other places.

        All ranks search; each looks at its own rows.
        """
        keys, filler = self._samples.keys_at(start), self._samples.keys_at(other)
        places = [(number, place) for number, some in enumerate(keys) for place in range(len(some))]
        search = by_rows.guilty(len(places))
        asked: Sequence[int] | None = next(search, None)
        found: Sequence[int] = ()
        while any(self._world.all_of(asked is not None)):
            batches = [list(some) for some in filler]
            for one in asked or ():
                number, place = places[one]
                batches[number][place] = keys[number][place]
            made = partial(self._made, batches)
            tried, _ = self._with(made, lambda batches: self._replay.of(batches, start))
            if asked is None:
                continue
            try:
                asked = search.send(tried is not None and not tried.loss <= limit)
            except StopIteration as end:
                found, asked = end.value, None
        mine = [keys[number][place].row for number, place in (places[one] for one in found)]
        return tuple(sorted({row for rows in self._world.all_of(mine) for row in rows}))

    def _some(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Name ranks, unless it is all of them."""
        named = tuple(ranks)
        return named if len(named) < self._world.size else ()

    def _diagnosed(self, anomaly: Anomaly, refused: Refused, history: History) -> Diagnosis | None:
        is_spike = anomaly.signal in _SPIKES
        is_batch = anomaly.signal is Signal.NONFINITE_BATCH
        if is_batch and (seen := by_looking(refused.update, self._samples, self._world)) is not None:
            return seen
        by_rank = self._world.all_of(self._facts(refused, is_spike))
        facts = verdict.together(by_rank)
        if not facts.reproduced:
            return verdict.on_untried(facts.could_not) if facts.could_not else verdict.TRANSIENT
        climb = max(verdict.climbed(one) for one in history)
        if is_spike:
            found = verdict.on_spike(facts, max(verdict.climbed(one[:-1]) for one in history), climb)
        else:
            found = verdict.on_nonfinite(facts, climb, is_first=all(len(one) < 2 for one in history))
        return replace(found, ranks=self._some(rank for rank, one in enumerate(by_rank) if one.reproduced))

    # What is tried. Every rank takes every turn.

    def _facts(self, refused: Refused, is_spike: bool) -> Facts:
        first, why = self._tried(refused, lambda: self._batches_of(refused))
        reproduced = first is not None and _breaks(first, refused)
        if not any(self._world.all_of(reproduced)):
            return Facts(could_not=why)
        filler, control = self._control(refused)
        seen = Seen() if is_spike else self._seen(refused)[0]
        facts = Facts(
            reproduced=reproduced,
            everywhere=control is not None and filler is None,
            is_compared=control is not None,
            batch_is_rotten=not is_spike
            and not refused.nan_is_usual
            and any(by_rows.rotten_fields(one) for one in refused.fed),
            size=first.norm if first is not None and not is_spike else 0.0,
            layer=_grown(first, control) if is_spike and first and control else None,
            could_not=why,
        )
        birth = self._birth(seen, first) if first is not None else None
        if birth is not None:
            after = None if birth.after is None else _culprit(birth.after, Seen())
            facts = replace(facts, culprit=_culprit(birth, seen), kind=birth.kind, is_total=birth.is_total, after=after)
        if self._replay.is_sharded:
            found = self._guilty_together(refused, filler)
            reproduced = bool(found) or birth is not None or _breaks_by_loss(first, refused)
            if not any(self._world.all_of(reproduced)):  # the gradients of all together, which all of them share
                reproduced = True
            facts = replace(facts, reproduced=reproduced)
        else:
            found = self._guilty(refused, filler if reproduced else None)
        if not refused.update.keys and birth is None:
            return replace(facts, could_not="rows of such data cannot be named")
        if not found or filler is None:
            return facts
        far = _ABSURD if facts.culprit else _FAR
        rotten = self._rotten(found, filler, far, refused.nan_is_usual)
        return replace(facts, rows=tuple(sorted({key.row for key in found})), rotten=rotten)

    def _seen(self, refused: Refused) -> tuple[Seen, Replayed | None]:
        """Look at the update under the microscope."""
        looked: list[Seen] = []

        def look(batches: Sequence[Any]) -> Replayed:
            seen, measured = self._replay.seen(batches, refused.update.start)
            looked.append(seen)
            return measured

        measured, _ = self._with(lambda: self._batches_of(refused), look)
        return (looked[0] if looked else Seen()), measured

    def _control(self, refused: Refused) -> tuple[Keys | None, Replayed | None]:
        """Try other rows at the same weights: keys of healthy ones if there are, and what the last try measured."""
        keys = refused.update.keys
        filler: Keys | None = None
        measured: Replayed | None = None
        if not any(self._world.all_of(bool(keys))):
            return None, None
        for draw in range(_CONTROLS):
            others = [self._samples.others(some, draw) for some in keys]
            tried, _ = self._tried(refused, partial(self._made, others))
            if tried is not None and filler is None:
                measured = tried
                filler = others if not _breaks(tried, refused) else None
            if all(self._world.all_of(filler is not None)):
                break
        return filler, measured

    def _guilty(self, refused: Refused, filler: Keys | None) -> list[Key]:
        """Search the batch for rows each of which breaks a healthy one; ranks that have nothing to search go along."""
        keys = refused.update.keys
        places = [(number, place) for number, some in enumerate(keys) for place in range(len(some))]
        search = by_rows.guilty(len(places)) if filler is not None and places else None
        wanted = next(search, None) if search is not None else None
        found: Sequence[int] = ()
        while any(self._world.all_of(wanted is not None)):
            batches = [list(some) for some in filler] if filler is not None else []
            for one in wanted or ():
                number, place = places[one]
                batches[number][place] = keys[number][place]
            tried, why = self._tried(refused, partial(self._made_or_fed, batches, refused))
            if search is None or wanted is None:
                continue
            try:  # where other rows cannot be tried, no row is to blame
                wanted = search.send(tried is not None and _breaks(tried, refused)) if not why else None
            except StopIteration as end:
                found, wanted = end.value, None
        return [keys[number][place] for number, place in (places[one] for one in found)]

    def _guilty_together(self, refused: Refused, filler: Keys | None) -> list[Key]:
        """The same where ranks share their weights: a gradient then tells of the rows of all ranks.

        So they are one batch, of which every rank asks for the same rows at a time.
        """
        keys, world = refused.update.keys, self._world
        places = [(number, place) for number, some in enumerate(keys) for place in range(len(some))]
        counts = world.all_of(len(places) if filler is not None else 0)
        if filler is None or not all(counts):
            return []
        first = sum(counts[: world.rank])
        search = by_rows.guilty(sum(counts))
        wanted = next(search, ())
        while True:
            batches = [list(some) for some in filler]
            mine = [places[one - first] for one in wanted if 0 <= one - first < len(places)]
            for number, place in mine:
                batches[number][place] = keys[number][place]
            tried, _ = self._tried(refused, partial(self._made, batches))
            try:
                wanted = search.send(any(world.all_of(tried is not None and _breaks(tried, refused))))
            except StopIteration as end:
                found = [places[one - first] for one in end.value if 0 <= one - first < len(places)]
                return [keys[number][place] for number, place in found]

    def _tried(self, refused: Refused, batches: Callable[[], Sequence[Any]]) -> tuple[Replayed | None, str]:
        return self._with(batches, lambda made: self._replay.of(made, refused.update.start))

    def _with(
        self, batches: Callable[[], Sequence[Any]], replay: Callable[[Sequence[Any]], Replayed]
    ) -> tuple[Replayed | None, str]:
        if not self._replay.is_sharded:
            return self._attempted(lambda: replay(batches()))
        made: Sequence[Any] | None = None
        why = "another rank could not make its batches"
        try:  # all make a forward, or none does: they would wait for each other in it
            made = batches()
        except Exception as error:
            why = f"{type(error).__name__}: {text_of(error)}".splitlines()[0]
        ready = [one for one in self._world.all_of(made is not None) if one]
        if made is None or len(ready) < self._world.size:
            return None, why
        return self._attempted(lambda: replay(made))

    def _attempted(self, replay: Callable[[], Replayed]) -> tuple[Replayed | None, str]:
        """Replay; what goes wrong in it is no reason to end a run, and says nothing about it."""
        try:
            return replay(), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {text_of(error)}".splitlines()[0]
        finally:
            self._beat()

    # What it is made of.

    def _batches_of(self, refused: Refused) -> Sequence[Any]:
        if not refused.is_spent:
            return [self._on_device(batch) for batch in refused.fed]
        if not refused.update.keys:
            raise RuntimeError("the objective has written into the batch, and it cannot be fetched again")
        return self._made(refused.update.keys)

    def _made(self, keys: Keys) -> Sequence[Any]:
        return [self._on_device(self._samples.collated(some)) for some in keys]

    def _made_or_fed(self, keys: Keys, refused: Refused) -> Sequence[Any]:
        return self._made(keys) if keys else self._batches_of(refused)

    def _birth(self, seen: Seen, first: Replayed) -> Birth | None:
        """Where the loss is not finite, no slope can be: that says nothing about what makes them."""
        return seen.backward if math.isfinite(first.loss) else seen.of_loss

    def _rotten(self, guilty: Sequence[Key], filler: Keys, far: float, nan_is_usual: bool) -> dict[int, str]:
        """What is odd about guilty rows, beside rows that are healthy."""
        others = [self._samples.fetched(key) for key in [key for some in filler for key in some][:_OTHERS]]
        told = {}
        for key in guilty:
            row = self._samples.fetched(key)
            odd = [] if nan_is_usual else by_rows.rotten_fields(row)
            if odd := odd or by_rows.outlying(row, others, far):
                told[key.row] = "; ".join(odd[:3])
        return told


def by_looking(update: Update, samples: Samples, world: World) -> Diagnosis | None:
    """Look for rows of an update whose values are not finite: that takes no replay. Every rank comes here."""
    rotten = {}
    for key in [key for some in update.keys for key in some] if samples.rows else []:
        if odd := by_rows.rotten_fields(samples.fetched(key)):
            rotten[key.row] = "; ".join(odd[:3])
    mine = Facts(reproduced=bool(rotten), rows=tuple(sorted(rotten)), rotten=rotten, batch_is_rotten=bool(rotten))
    seen = verdict.together(world.all_of(mine))
    return verdict.on_nonfinite(seen, 1.0) if seen.rows else None


def by_size(
    suspects: Sequence[int],
    also: Sequence[int],
    ahead: int,
    samples: Samples,
    world: World,
    beat: Callable[[], None],
) -> Diagnosis | None:
    """Look for rows whose values are far beyond those of others, in the updates at these positions.

    If there are some, `also` in others, and in so many samples ahead, so that they are not met one by one. It takes no
    replay, so it asks for much: it is for what can be explained by nothing else. Every rank comes here.
    """
    if not samples.rows or not suspects:
        return None

    def fetched(key: Key) -> Any:
        beat()
        try:
            return samples.fetched(key)
        except Exception:  # rows that cannot be fetched are met where they are trained on
            return None

    keys = [key for start in suspects for some in samples.keys_at(start) for key in some]
    usual = by_rows.usual_sizes([fetched(key) for key in samples.others(keys[:_OTHERS], 0)])
    odd = {key.row: told for key in keys if (told := by_rows.far_out(fetched(key), usual, UNHEARD_OF))}
    if not any(world.all_of(bool(odd))):
        return None
    for start in (*also, *samples.starts(max(suspects), ahead)):
        for key in [key for some in samples.keys_at(start) for key in some]:
            if told := by_rows.far_out(fetched(key), usual, UNHEARD_OF):
                odd[key.row] = told
    found = {row: told for one in world.all_of(odd) for row, told in one.items()}
    return verdict.on_far_out(found)


def _breaks(one: Replayed, refused: Refused) -> bool:
    """Of a gradient that is not finite, too: the norm of a replay is in doubles."""
    return one.is_beyond(refused.limits)


def _breaks_by_loss(one: Replayed | None, refused: Refused) -> bool:
    """Whether the loss of this rank alone would have been refused."""
    return one is not None and not -math.inf < one.loss <= refused.limits[0]


def _culprit(birth: Birth, seen: Seen) -> Culprit:
    line = birth.line
    inputs = birth.inputs or seen.inputs
    return Culprit(
        birth.phase, birth.op, line.module if line else "", line.file if line else "", line.line if line else 0, inputs
    )


def _place(culprit: Culprit) -> tuple[str, str, str, int]:
    return culprit.phase, culprit.op, culprit.file, culprit.line


def _grown(now: Replayed, usual: Replayed) -> tuple[str, float] | None:
    """The weight whose gradient is farthest above that of a healthy batch."""
    grown = {name: norm / usual.by_layer[name] for name, norm in now.by_layer.items() if usual.by_layer.get(name)}
    return max(grown.items(), key=lambda one: one[1], default=None)
