"""Searches for what is behind an incident: replays, a control, the microscope, the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from resilient_train.data.samples import Samples, Update
from resilient_train.data.stream import Key
from resilient_train.diagnose import rows as by_rows
from resilient_train.diagnose import verdict
from resilient_train.diagnose.microscope import Birth, Seen
from resilient_train.diagnose.replay import Replay, Replayed
from resilient_train.diagnose.verdict import Facts
from resilient_train.events import Anomaly, Culprit, Diagnosis, Signal
from resilient_train.ranks.world import World
from resilient_train.state import randomness

_CONTROLS = 4  # draws of other rows at most, where the first ones break as well
_OTHERS = 128  # rows that a row is compared with
_FAR = 4.0  # times the largest of those: what makes a gradient jump is an outlier
_ABSURD = 1e4  # the same where an operation broke: one that cannot take a large value is to blame itself
_NONFINITE = (Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD, Signal.NONFINITE_BATCH)
_SPIKES = (Signal.LOSS_SPIKE, Signal.GRAD_SPIKE)


@dataclass(frozen=True, slots=True)
class Refused:
    """An update that the gate refused: all that its replay takes."""

    update: Update
    fed: Sequence[Any]  # its micro-batches as the model saw them
    limits: tuple[float, float]  # of the gate, for loss and gradient norm


class Search:
    """Finds the culprit of an update that was refused. Every rank searches at the same time and learns the same."""

    def __init__(self, replay: Replay, samples: Samples, world: World, on_device: Callable[[Any], Any]) -> None:
        self._replay, self._samples, self._world, self._on_device = replay, samples, world, on_device
        # Where ranks wait for each other in a forward, all have to replay as often.
        self._in_step = world.size > 1 and any(isinstance(one, nn.SyncBatchNorm) for one in replay.model.modules())

    def diagnose(self, anomaly: Anomaly, refused: Refused, history: Sequence[Sequence[float]]) -> Diagnosis | None:
        """Say what was behind it; None where nothing can be said beyond the signal.

        `history` holds the losses and the gradient norms of the updates before it, and its own at the end.
        """
        if anomaly.signal not in (*_NONFINITE, *_SPIKES):
            return None
        with randomness.preserved(self._world.device):  # to fetch rows leaves them anywhere
            return self._diagnosed(anomaly, refused, history)

    def _diagnosed(self, anomaly: Anomaly, refused: Refused, history: Sequence[Sequence[float]]) -> Diagnosis | None:
        is_spike = anomaly.signal in _SPIKES
        if anomaly.signal is Signal.NONFINITE_BATCH:
            seen = verdict.together(self._world.all_of(self._rotten_rows(refused)))
            if seen.rows:
                return verdict.on_nonfinite(seen, 1.0)
        facts = verdict.together(self._world.all_of(self._facts(refused, is_spike)))
        if not facts.reproduced:
            return None if facts.could_not else verdict.TRANSIENT
        climb = max(verdict.climbed(one) for one in history)
        if is_spike:
            return verdict.on_spike(facts, max(verdict.climbed(one[:-1]) for one in history), climb)
        return verdict.on_nonfinite(facts, climb, is_first=all(len(one) < 2 for one in history))

    def _facts(self, refused: Refused, is_spike: bool) -> Facts:
        start = refused.update.start

        def breaks(one: Replayed) -> bool:
            return one.is_beyond(refused.limits)  # of a gradient that is not finite, too: its norm may be in doubles

        first = self._replay.of(refused.fed, start)
        reproduced = breaks(first)
        if not any(self._world.all_of(reproduced)):
            return Facts()
        filler, control = self._control(refused, breaks)
        seen = Seen() if is_spike else self._replay.seen(refused.fed, start)
        facts = Facts(
            reproduced=reproduced,
            everywhere=control is not None and filler is None,
            is_compared=control is not None,
            batch_is_rotten=not is_spike and any(by_rows.rotten_fields(one) for one in refused.fed),
            layer=_grown(first, control) if is_spike and control is not None else None,
        )
        # Where the loss is not finite, no slope can be: that says nothing about what makes them.
        birth = seen.backward if math.isfinite(first.loss) else seen.of_loss
        if birth is not None:
            facts = replace(facts, culprit=_culprit(birth, seen), kind=birth.kind, is_total=birth.is_total)
        if filler is None or not reproduced or self._in_step:
            could_not = "" if refused.update.keys else "rows of such data cannot be named"
            return replace(facts, could_not=could_not if facts.culprit is None else "")
        return self._with_rows(facts, refused, filler, breaks, _ABSURD if facts.culprit else _FAR)

    def _rotten_rows(self, refused: Refused) -> Facts:
        """Look for values that are not finite row by row: that takes no replay."""
        rotten = {}
        for key in [key for some in refused.update.keys for key in some]:
            if odd := by_rows.rotten_fields(self._samples.fetched(key)):
                rotten[key.row] = "; ".join(odd[:3])
        return Facts(reproduced=bool(rotten), rows=tuple(sorted(rotten)), rotten=rotten, batch_is_rotten=bool(rotten))

    def _control(
        self, refused: Refused, breaks: Callable[[Replayed], bool]
    ) -> tuple[list[list[Key]] | None, Replayed | None]:
        """Try other rows at the same weights: keys of healthy ones if there are, and what the last try measured."""
        keys, samples = refused.update.keys, self._samples
        if not keys:
            return None, None
        measured: Replayed | None = None
        for draw in range(1 if self._in_step else _CONTROLS):
            try:
                others = [samples.others(some, draw) for some in keys]
                measured = self._replay.of(self._batches(others), refused.update.start)
            except Exception:  # a control that cannot be made says nothing; what training meets is told by training
                continue
            if not breaks(measured):
                return others, measured
        return None, measured

    def _with_rows(
        self, facts: Facts, refused: Refused, filler: list[list[Key]], breaks: Callable[[Replayed], bool], far: float
    ) -> Facts:
        """Search the batch for rows each of which breaks a healthy one; `far` beyond others, a value is an outlier."""
        keys, start = refused.update.keys, refused.update.start
        places = [(number, place) for number, some in enumerate(keys) for place in range(len(some))]

        def tried(kept: Sequence[int]) -> bool:
            batches = [list(some) for some in filler]
            for one in kept:
                number, place = places[one]
                batches[number][place] = keys[number][place]
            return breaks(self._replay.of(self._batches(batches), start))

        try:
            found = by_rows.guilty(len(places), tried)
        except Exception as error:  # such as a model that refuses other rows
            return replace(facts, could_not=f"its rows could not be tried apart ({type(error).__name__})")
        guilty = [keys[number][place] for number, place in (places[one] for one in found)]
        return replace(facts, rows=tuple(sorted({key.row for key in guilty})), rotten=self._rotten(guilty, filler, far))

    def _rotten(self, guilty: Sequence[Key], filler: Sequence[Sequence[Key]], far: float) -> dict[int, str]:
        """What is odd about guilty rows, beside rows that are healthy."""
        samples = self._samples
        others = [samples.fetched(key) for key in [key for some in filler for key in some][:_OTHERS]]
        told = {}
        for key in guilty:
            row = samples.fetched(key)
            odd = by_rows.rotten_fields(row) or by_rows.outlying(row, others, far)
            if odd:
                told[key.row] = "; ".join(odd[:3])
        return told

    def _batches(self, keys: Sequence[Sequence[Key]]) -> list[Any]:
        return [self._on_device(self._samples.collated(some)) for some in keys]


def _culprit(birth: Birth, seen: Seen) -> Culprit:
    line = birth.line
    inputs = birth.inputs or seen.inputs
    return Culprit(
        birth.phase, birth.op, line.module if line else "", line.file if line else "", line.line if line else 0, inputs
    )


def _grown(now: Replayed, usual: Replayed) -> tuple[str, float] | None:
    """The weight whose gradient is farthest above that of a healthy batch."""
    grown = {name: norm / usual.by_layer[name] for name, norm in now.by_layer.items() if usual.by_layer.get(name)}
    return max(grown.items(), key=lambda one: one[1], default=None)
