"""Looks at what a run is made of: the scans, when they are due, and all of them at once after trouble."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from resilient_train.data.rescue import FailedRow
from resilient_train.events import Anomaly, Signal
from resilient_train.ranks.world import World
from resilient_train.state.backup import Backup, Backups
from resilient_train.state.run_state import Clock
from resilient_train.watch import pulse
from resilient_train.watch.readback import Sent
from resilient_train.watch.scans import Scans


class Examination:
    """Launches scans and hears them an update later, as the vitals; or now, when time does not matter."""

    def __init__(self, world: World, clock: Clock, scans: Scans, backups: Backups) -> None:
        self._world, self._clock, self._scans, self._backups = world, clock, scans, backups
        self._launched: tuple[int, int, Sent] | None = None  # step and tick of a scan whose numbers are on their way
        self.nan_is_usual = False  # batches hold values that are not finite, masks perhaps, and nobody minds

    def launch(self, before: Backup) -> None:
        """Measure what is due of the state without what a forward, of which nothing is known yet, did to buffers.

        `before` holds the buffers from before it.
        """
        if not self._scans.due(self._clock.step):
            return
        with_it = self._backups.take()
        self._backups.put_back(before)
        sent = Sent(self._world.max(self._scans.measure()))
        self._backups.put_back(with_it)
        self._backups.let_go(with_it)
        self._launched = (self._clock.step, self._clock.tick, sent)

    def hear(self) -> Anomaly | None:
        """The verdict of a scan that was launched an update ago."""
        if self._launched is None:
            return None
        (step, tick, sent), self._launched = self._launched, None
        return self._scans.judge(step, tick, sent.read())

    def now(self) -> Anomaly | None:
        """Look at everything at once and wait for it."""
        self._launched = None
        numbers = self._world.max(self._scans.measure(everything=True)).tolist()
        return self._scans.judge(self._clock.step, self._clock.tick, numbers)

    def note_first(self, fed: Sequence[Any]) -> None:
        """Learn from the first update, which was healthy, whether NaN in a batch is usual."""
        self.nan_is_usual = bool(self._ranks_where(not pulse.all_finite(fed)))

    def named(self, anomaly: Anomaly, fed: Sequence[Any], failed: Sequence[FailedRow]) -> Anomaly:
        """Say more precisely what is wrong, now that time does not matter. Every rank comes here.

        Rows that could not be fetched were replaced, and the update was spoiled on purpose. Rotten weights explain what
        followed from them, and so does a rotten batch. Weights are asked first: a batch may hold NaN for a mask. What
        is usual in batches, it is not to blame.
        """
        everywhere = self._world.all_of(list(failed))
        if any(everywhere):
            first = next(rows[0] for rows in everywhere if rows)
            evidence = f"row {first.row} cannot be fetched: {first}"
            ranks = tuple(rank for rank, rows in enumerate(everywhere) if rows) if self._world.size > 1 else ()
            return dataclasses.replace(anomaly, signal=Signal.EXCEPTION, evidence=evidence, ranks=ranks)
        if (found := self.now()) is not None:
            return found
        if anomaly.signal not in (Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD) or self.nan_is_usual:
            return anomaly
        ranks = self._ranks_where(not pulse.all_finite(fed))
        if not ranks:
            return anomaly
        evidence = f"the batch holds values that are not finite; {anomaly.evidence}"
        ranks = ranks if self._world.size > 1 else ()
        return dataclasses.replace(anomaly, signal=Signal.NONFINITE_BATCH, evidence=evidence, ranks=ranks)

    def _ranks_where(self, is_so: bool) -> tuple[int, ...]:
        flags = torch.zeros(self._world.size, device=self._world.device)
        flags[self._world.rank] = is_so
        return tuple(rank for rank, flag in enumerate(self._world.sum(flags).tolist()) if flag)
