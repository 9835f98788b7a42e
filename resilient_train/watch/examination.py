"""Looks at what a run is made of: the scans, when they are due, and all of them at once after trouble."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from resilient_train.data.failed_rows import FailedRow
from resilient_train.ranks.world import World, odd_ones
from resilient_train.state.copies import Backup, Backups
from resilient_train.state.run_state import Clock
from resilient_train.types import Anomaly, Signal
from resilient_train.watch.scans import Scans
from resilient_train.watch.vitals import Sent, all_finite
from resilient_train.wording import rank_names

_APART = 1e-5  # of a number that replicas have in common: far above rounding, far below what any scan minds
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class _Launched:
    """A measurement whose numbers are on their way."""

    step: int
    tick: int
    mine: torch.Tensor  # of this rank alone
    sent: Sent  # of all ranks together


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """Replicas that differed, and nobody could tell whose were changed."""

    step: int
    digests: list[int]  # by rank


class Examination:
    """Launches scans and hears them an update later, as the vitals; or now, when time does not matter."""

    def __init__(self, world: World, clock: Clock, scans: Scans, backups: Backups) -> None:
        self._world, self._clock, self._scans, self._backups = world, clock, scans, backups
        self._launched: _Launched | None = None  # a scan
        self._compared: _Launched | None = None  # replicas
        self._suspicion: _Suspicion | None = None
        self._guilty: tuple[int, ...] = ()  # ranks on which an earlier difference began, found since
        self.nan_is_usual = False  # batches hold values that are not finite, masks perhaps, and nobody minds

    def launch(self, before: Backup) -> None:
        """Measure what is due of the state without what a forward, of which nothing is known yet, did to buffers.

        `before` holds the buffers from before it.
        """
        if self._scans.replicas.is_due(self._clock.step):
            self._compared = self._sent(self._scans.replicas.measure(self._scans.layout))
        if not self._scans.due(self._clock.step):
            return
        with_it = self._backups.take()
        self._backups.put_back(before)
        self._launched = self._measured()
        self._backups.put_back(with_it)
        self._backups.let_go(with_it)

    def verdict(self) -> Anomaly | None:
        """The verdict of what was launched an update ago."""
        launched, compared = self._launched, self._compared
        self._launched = self._compared = None
        found = None if launched is None else self._judged(launched)
        differing = None if compared is None else self._judge_replicas(compared)
        if found is None or differing is None:
            return found or differing
        return dataclasses.replace(found, since=min(found.since, differing.since), ranks=found.ranks or differing.ranks)

    def guilty_ranks(self) -> tuple[int, ...]:
        """Return, once, the ranks on which an earlier difference began, if that has been found."""
        guilty, self._guilty = self._guilty, ()
        return guilty

    def examine_now(self) -> Anomaly | None:
        """Look at everything at once and wait for it."""
        self._launched = self._measured(everything=True)
        if self._scans.replicas.every:
            self._compared = self._sent(self._scans.replicas.measure(self._scans.layout))
        return self.verdict()

    def _sent(self, mine: torch.Tensor) -> _Launched:
        return _Launched(self._clock.step, self._clock.tick, mine, Sent(self._world.max(mine)))

    def _measured(self, *, everything: bool = False) -> _Launched:
        """Measure, and reduce over the ranks: the largest of each number, and behind them the least, turned around."""
        mine = self._scans.measure(everything=everything)
        if any(shares := self._scans.are_shares()):
            is_share = torch.tensor(shares, device=mine.device)
            mine = torch.where(is_share, self._world.sum(torch.where(is_share, mine, 0.0)), mine)
        both = mine if self._world.size == 1 else self._world.max(torch.cat([mine, -mine]))
        return _Launched(self._clock.step, self._clock.tick, mine, Sent(both))

    def _judged(self, one: _Launched) -> Anomaly | None:
        """Judge what is the largest over all ranks; where replicas are apart, every rank by itself.

        The largest hides what has become too small on one of them, such as moments that have faded.
        """
        numbers = one.sent.read()
        if self._world.size == 1:
            return self._scans.judge(one.step, one.tick, numbers)
        count = len(numbers) // 2
        most, least = numbers[:count], [-number for number in numbers[count:]]
        copies = self._scans.are_copies()
        if most == least or not any(map(_are_apart, most, least, copies)):
            return self._scans.judge(one.step, one.tick, most)
        table = self._world.gather(one.mine)  # every rank comes here: they have read the same
        assert table is not None
        ranks = [
            [own if is_copy else largest for own, largest, is_copy in zip(row, most, copies, strict=True)]
            for row in table.tolist()
        ]
        return self._scans.judge_each(one.step, one.tick, ranks)

    def _judge_replicas(self, compared: _Launched) -> Anomaly | None:
        """Say which ranks differ, and in what."""
        replicas, (largest, _) = self._scans.replicas, (read := list(map(int, compared.sent.read())))
        if replicas.judge(compared.step, read):
            self._settle_suspicion(compared.step, largest)
            return None
        digests = self._by_rank(compared.mine[:1])
        odd = odd_ones(digests)
        self._suspicion = _Suspicion(compared.step, digests) if len(odd) == len(digests) else None
        names, mine = replicas.each(self._scans.layout)
        most, least = self._world.max(torch.cat([mine, ~mine])).view(2, -1)
        apart = [name for name, differs in zip(names, (most != ~least).tolist(), strict=True) if differs]
        more = f" and {len(apart) - 1:,} more" if len(apart) > 1 else ""
        where = f" in `{apart[0]}`{more}, of {len(names):,} tensors" if apart else ""
        others = "" if len(odd) == len(digests) else f" from the {len(digests) - len(odd):,} others"
        evidence = f"{rank_names(odd)} {'differs' if len(odd) == 1 else 'differ'}{others}{where}"
        return Anomaly(
            *(Signal.RANK_MISMATCH, compared.step, compared.tick, replicas.clean_step, evidence),
            ranks=odd,
        )

    def _settle_suspicion(self, step: int, digest: int) -> None:
        """Where the run comes to the same step again, who comes to other weights than then was changed then."""
        suspicion, self._suspicion = self._suspicion, None
        if suspicion is None or step < suspicion.step:
            self._suspicion = suspicion
        elif step == suspicion.step and digest in suspicion.digests:
            self._guilty = tuple(rank for rank, then in enumerate(suspicion.digests) if then != digest)

    def _by_rank(self, number: torch.Tensor) -> list[int]:
        """A whole number of every rank; the host waits for it."""
        table = self._world.gather(number)
        return (number if table is None else table[:, 0]).tolist()

    def learn_usual_batches(self, fed: Sequence[Any]) -> None:
        """Learn from the first update, which was healthy, whether NaN in a batch is usual."""
        self.nan_is_usual = bool(self._ranks_where(not all_finite(fed)))

    def refine_signal(
        self, anomaly: Anomaly, fed: Sequence[Any], failed: Sequence[FailedRow], *, spiked: bool
    ) -> Anomaly:
        """Say more precisely what is wrong, now that time does not matter. Every rank comes here.

        `spiked`: the loss of this rank was above what the gate allows.

        Rows that could not be fetched were replaced, and the update was spoiled on purpose. Bad weights explain what
        followed from them, and so does a bad batch. Weights are asked first: a batch may hold NaN for a mask. What
        is usual in batches, it is not to blame.
        """
        everywhere = self._world.all_of(list(failed))
        if any(everywhere):
            first = next(rows[0] for rows in everywhere if rows)
            evidence = f"row {first.row} cannot be fetched: {first}"
            ranks = tuple(rank for rank, rows in enumerate(everywhere) if rows) if self._world.size > 1 else ()
            return dataclasses.replace(anomaly, signal=Signal.EXCEPTION, evidence=evidence, ranks=ranks)
        if (found := self.examine_now()) is not None:
            return found
        if anomaly.signal is Signal.LOSS_SPIKE and self._world.size > 1:
            ranks = self._ranks_where(spiked)
            return dataclasses.replace(anomaly, ranks=ranks if len(ranks) < self._world.size else ())
        if anomaly.signal not in (Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD) or self.nan_is_usual:
            return anomaly
        ranks = self._ranks_where(not all_finite(fed))
        if not ranks:
            return anomaly
        evidence = f"the batch holds values that are not finite; {anomaly.evidence}"
        ranks = ranks if self._world.size > 1 else ()
        return dataclasses.replace(anomaly, signal=Signal.NONFINITE_BATCH, evidence=evidence, ranks=ranks)

    def _ranks_where(self, is_so: bool) -> tuple[int, ...]:
        flags = torch.zeros(self._world.size, device=self._world.device)
        flags[self._world.rank] = is_so
        return tuple(rank for rank, flag in enumerate(self._world.sum(flags).tolist()) if flag)


def _are_apart(most: float, least: float, is_copy: bool) -> bool:
    """Whether ranks differ in a number; what is not finite on all of them has been turned into the largest there is."""
    most = min(most, _LARGEST)
    return is_copy and most - least > _APART * max(abs(most), abs(least))
