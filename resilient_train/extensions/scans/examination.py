"""Looks at the state of a run: by scans when they are due, and by all of them at once after trouble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from resilient_train.core.loss import Every
from resilient_train.core.mark import Mark
from resilient_train.core.protocols import Examiner, Hook
from resilient_train.core.transaction import Transaction
from resilient_train.core.tree import leaves
from resilient_train.extensions import Extension
from resilient_train.extensions.scans.layout import Layout
from resilient_train.extensions.scans.scans import Scans
from resilient_train.extensions.scans.weights import NormsConfig, ScanConfig
from resilient_train.ground.types import Anomaly, Facts, Signal, fact
from resilient_train.parts.run import Run


class StateScans(Extension, Examiner, Hook):
    """Scans of weights, moments, replicas and running statistics."""

    settings = MappingProxyType(
        {"weights": ScanConfig, "optimizer": ScanConfig, "replicas": Every, "norms": NormsConfig}
    )

    def build(self, run: Run) -> None:
        self._run, self._world = run, run.world
        world, layout = run.world if run.world.size > 1 else None, Layout(run.backend.bare, run.updater.optimizers)
        self._scans = Scans(run.settings, layout, world)
        run.scans, run.examiner = self._scans, self
        run.hooks.append(self)
        self._knows_batches = False  # in this process

    def launch(self, before: Mark) -> None:
        """Measure what is due, with the buffers of `before`: the newest forward may be part of a bad update."""
        if self._scans.is_due():
            with self._run.marks.buffers_of(before) as kept:
                self._scans.measure(self._run.clock.tick, kept)

    def verdict(self) -> Anomaly | None:
        return self._scans.judge()

    def examine_now(self) -> Anomaly | None:
        kept = {name: item.state_dict() for name, item in self._run.state.kept.items()}
        self._scans.measure(self._run.clock.tick, kept, everything=True)
        return self._scans.judge()

    def accepted(self, update: Transaction) -> None:
        """Learn from the first healthy update of a process whether NaN in a batch is usual."""
        if not self._knows_batches:
            self._run.checks.nan_is_usual |= bool(self._ranks_with_bad_batch(update))
            self._knows_batches = True

    def refined(self, anomaly: Anomaly, update: Transaction, *, is_scanned: bool) -> Anomaly:
        """Say more precisely what is wrong with a bad update, or with the state that a scan has seen. Every rank comes.

        In this order: bad weights, which explain all else; rows that could not be fetched, which make the loss NaN, and
        exceptions; a bad batch, unless its NaN is usual. Where all updates land, weights that are not finite follow.
        """
        if is_scanned and anomaly.signal is not Signal.NONFINITE_WEIGHTS:
            return anomaly
        errors = [fact("row_failed", row=one.row, error=one.error) for one in update.update.failed]
        errors += [fact("text", text=one) for one in update.raised]
        everywhere = self._world.all_of(errors)
        if not self._run.policy.observe and (found := self.examine_now()) is not None:
            # The loop may have put what the batch holds into the weights, as two passes of SAM do.
            is_of_batch = found.signal is Signal.NONFINITE_WEIGHTS
            return replace(found, **self._bad_batch(update, found.evidence)) if is_of_batch else found
        if any(everywhere):
            evidence = next(some[0] for some in everywhere if some)
            ranks = [rank for rank, some in enumerate(everywhere) if some]
            return replace(anomaly, signal=Signal.EXCEPTION, evidence=evidence, ranks=self._named(ranks))
        if anomaly.signal not in (Signal.NONFINITE_LOSS, Signal.NONFINITE_GRAD):
            return anomaly
        return replace(anomaly, **self._bad_batch(update, anomaly.evidence))

    def _bad_batch(self, update: Transaction, evidence: Facts) -> dict[str, Any]:
        """Return what an anomaly is if its batch is bad on any rank, and that is not usual."""
        ranks = [] if self._run.checks.nan_is_usual else self._ranks_with_bad_batch(update)
        evidence = fact("bad_batch") + evidence
        return {"signal": Signal.NONFINITE_BATCH, "evidence": evidence, "ranks": self._named(ranks)} if ranks else {}

    def _ranks_with_bad_batch(self, update: Transaction) -> list[int]:
        """Find out whose batches, of any shape, hold a NaN or infinity. Waits for the device."""
        tensors = [leaf for leaf in leaves(list(update.inputs)) if isinstance(leaf, torch.Tensor)]
        numbers = [one for one in tensors if one.is_floating_point() or one.is_complex()]
        bad = self._world.all_of(not all(bool(one.isfinite().all()) for one in numbers))
        return [rank for rank, is_bad in enumerate(bad) if is_bad]

    def _named(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(ranks) if self._world.size > 1 else ()
