"""Looks at the state of a run: by scans when they are due, and by all of them at once after trouble."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from resilient_train.core.checks import Checks
from resilient_train.core.copies import Stateful
from resilient_train.core.loss import Every
from resilient_train.core.mark import Mark, Marks
from resilient_train.core.protocols import Examiner, Hook
from resilient_train.core.state import Clock
from resilient_train.core.transaction import Transaction
from resilient_train.core.tree import Tree, leaves
from resilient_train.core.vitals import Sent
from resilient_train.extensions import Extension
from resilient_train.extensions.scans.scans import Scans
from resilient_train.extensions.scans.weights import NormsConfig, ScanConfig
from resilient_train.ground.types import Anomaly, Facts, Signal, fact
from resilient_train.parts.run import Run, nonfinite
from resilient_train.processes.world import World


class _Launched(NamedTuple):
    step: int
    tick: int
    mine: torch.Tensor  # of this rank
    sent: Sent  # the largest over all ranks


class Examination(Examiner):
    def __init__(
        self,
        world: World,
        clock: Clock,
        checks: Checks,
        scans: Scans,
        marks: Marks,
        kept: Mapping[str, Stateful],
        *,
        observes: bool = False,
    ) -> None:
        self._world, self._clock, self._checks, self._scans = world, clock, checks, scans
        self._marks, self._kept, self._observes = marks, kept, observes  # by policy: all updates land
        self._scan: _Launched | None = None

    def launch(self, before: Mark) -> None:
        """Measure what is due, with the buffers of `before`: the newest forward may be part of a bad update."""
        if self._scans.is_due(self._clock.step):
            with self._marks.buffers_of(before) as kept:
                self._scan = self._measure(kept)

    def _measure(self, kept: Mapping[str, Tree], *, everything: bool = False) -> _Launched:
        """Measure, and reduce to the largest of each number over all ranks, followed by the negated smallest."""
        mine = self._scans.measure(kept, everything=everything)
        both = mine if self._world.size == 1 else self._world.max(torch.cat([mine, -mine]))
        return _Launched(self._clock.step, self._clock.tick, mine, Sent(both))

    def examine_now(self) -> Anomaly | None:
        """Measure everything, and wait for it."""
        self._scan = self._measure({name: item.state_dict() for name, item in self._kept.items()}, everything=True)
        return self.verdict()

    def verdict(self) -> Anomaly | None:
        scan, self._scan = self._scan, None
        if scan is None:
            return None
        numbers, count = scan.sent.read(), len(scan.mine)
        least = [-number for number in numbers[count:]]

        def of_ranks() -> list[list[float]]:  # every rank comes, as they have read the same
            return self._world.all_of(scan.mine.tolist())

        found = self._scans.judge(scan.step, scan.tick, numbers[:count], least or None, of_ranks)
        if found is None or found.signal is not Signal.RANK_MISMATCH:
            return found
        of_each = self._world.all_of(self._scans.digests())
        apart = [name for name in of_each[0] if len({one.get(name) for one in of_each}) > 1]
        where = {"name": apart[0], "apart": len(apart), "count": len(of_each[0])} if apart else {}
        return dataclasses.replace(found, evidence=({**found.evidence[0], **where},))

    def learn_usual_batches(self, batches: Sequence[Any]) -> None:
        """Learn from the first healthy update of a process whether NaN in a batch is usual."""
        self._checks.nan_is_usual |= bool(self._ranks_where(not _all_finite(batches)))

    def refined(self, anomaly: Anomaly, update: Transaction, *, is_scanned: bool) -> Anomaly:
        """Say more precisely what is wrong with a bad update, or with the state that a scan has seen. Every rank comes.

        In this order: rows that could not be fetched, which make the loss NaN; bad weights, which explain all else;
        exceptions; a bad batch, unless its NaN is usual. Where all updates land, weights that are not finite follow.
        """
        batches = update.inputs
        if is_scanned and anomaly.signal is not Signal.NONFINITE_WEIGHTS:
            return anomaly
        of_rows = [fact("row_failed", row=one.row, error=one.error) for one in update.update.failed]
        of_errors = [fact("text", text=one) for one in update.raised]
        everywhere, of_code = zip(*self._world.all_of((of_rows, of_errors)), strict=True)
        is_alone = self._world.size == 1
        if not any(everywhere):
            if not self._observes and (found := self.examine_now()) is not None:
                # The loop may have put what the batch holds into the weights, as two passes of SAM do.
                is_of_batch = found.signal is Signal.NONFINITE_WEIGHTS
                return dataclasses.replace(found, **self._bad_batch(batches, found.evidence)) if is_of_batch else found
            everywhere = of_code
        if any(everywhere):
            evidence = next(some[0] for some in everywhere if some)
            ranks = tuple(rank for rank, some in enumerate(everywhere) if some and not is_alone)
            return dataclasses.replace(anomaly, signal=Signal.EXCEPTION, evidence=evidence, ranks=ranks)
        if anomaly.signal is Signal.LOSS_SPIKE and not is_alone:
            ranks = self._ranks_where(not float(update.attempt.loss) <= update.limits[0])
            return dataclasses.replace(anomaly, ranks=ranks if len(ranks) < self._world.size else ())
        if anomaly.signal not in (Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD):
            return anomaly
        evidence = anomaly.evidence + nonfinite(update.attempt.norms())
        return dataclasses.replace(anomaly, **{"evidence": evidence, **self._bad_batch(batches, evidence)})

    def _bad_batch(self, batches: Sequence[Any], evidence: Facts) -> dict[str, Any]:
        """Return what an anomaly is if its batch is bad on any rank, and that is not usual."""
        ranks = () if self._checks.nan_is_usual else self._ranks_where(not _all_finite(batches))
        if not ranks:
            return {}
        of_batch = {"signal": Signal.NONFINITE_BATCH, "evidence": fact("bad_batch") + evidence}
        return {**of_batch, "ranks": () if self._world.size == 1 else ranks}

    def _ranks_where(self, is_so: bool) -> tuple[int, ...]:
        flags = torch.zeros(self._world.size, device=self._world.device)
        flags[self._world.rank] = is_so
        return tuple(rank for rank, flag in enumerate(self._world.sum(flags).tolist()) if flag)


def _all_finite(batches: Iterable[Any]) -> bool:
    """Whether batches of any shape hold no NaN or infinity. Waits for the device."""
    tensors = [leaf for leaf in leaves(list(batches)) if isinstance(leaf, torch.Tensor)]
    return all(bool(one.isfinite().all()) for one in tensors if one.is_floating_point() or one.is_complex())


class StateScans(Extension, Hook):
    """Scans of weights, moments, replicas and running statistics."""

    settings = MappingProxyType(
        {"weights": ScanConfig, "optimizer": ScanConfig, "replicas": Every, "norms": NormsConfig}
    )

    def build(self, run: Run) -> None:
        self._run, optimizers = run, run.updater.optimizers
        scans = run.scans = Scans(run.settings, run.backend.bare, optimizers, run.own_weights)
        observes, kept = run.policy.observe, run.state.kept
        self._examination = Examination(run.world, run.clock, run.checks, scans, run.marks, kept, observes=observes)
        run.examiner = self._examination
        run.hooks.append(self)
        self._is_over = False

    def accepted(self, update: Transaction) -> None:
        """Learn from the first healthy update of a process what is usual in its batches."""
        if not self._is_over and (self._run.clock.step == 1 or not self._run.checks.knows_usual_batches):
            self._examination.learn_usual_batches(update.inputs)
        self._is_over = True
