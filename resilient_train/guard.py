"""One update, from its samples to the gate, and the verdict on the one before it.

k+1: take samples -> forward and backward of each micro-batch
     -> hear the verdict on k, measured an update ago: an anomaly stops here, before k+1 lands
     -> gate k+1 on the device -> step -> what it measured is on its way
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from resilient_train import numerics
from resilient_train.data.samples import Update
from resilient_train.diagnose.search import Refused
from resilient_train.drills import Drill, Place
from resilient_train.errors import GaveUp, RanksDiffer, StorageFailed, TrainError
from resilient_train.micro_batches import MicroBatchSizer, is_out_of_memory, memory_evidence
from resilient_train.record.progress import Doing
from resilient_train.recovery import Recovery
from resilient_train.run_parts import RunParts
from resilient_train.state.copies import Backup, Backups
from resilient_train.state.randomness import Purpose, mix, seed_all
from resilient_train.state.ring import Snapshot
from resilient_train.types import Anomaly, Vitals
from resilient_train.update.agreement import DIGEST, Flag
from resilient_train.update.direct_steps import DirectStepCheck, warn_of_scalers
from resilient_train.update.objective import Measured, Metrics
from resilient_train.update.updater import Attempt
from resilient_train.watch.examination import Examination
from resilient_train.watch.modes import AnomalyMode, EvaluationLoss
from resilient_train.watch.vitals import MetricsLog, Sent, mean, mean_metrics, read_vitals, versions
from resilient_train.wording import log


@dataclass
class _Begun:
    """An update whose forward and backward are under way."""

    update: Update
    tick: int
    step: int  # that it would be
    backup: Backup  # of the buffers, from before
    fed: list[Any]  # its micro-batches, as the model saw them
    began: float  # on the monotonic clock
    versions: list[Any] = field(default_factory=list)  # of their tensors, as they were then


@dataclass
class _InFlight:
    """An update that went to the gate, and whose verdict is pending."""

    begun: _Begun
    attempt: Attempt
    loss: torch.Tensor  # of this rank
    limits: tuple[float, float]
    sent: Sent
    metrics: Metrics
    snapshot: Snapshot | None = None  # the snapshot of the state after it, if one was taken


class EngineGuard:
    """Makes updates that a gate may refuse, and hands what goes wrong to recovery."""

    _newest: ClassVar[int] = 0  # which update was begun last, by any guard of this process

    def __init__(
        self,
        model: nn.Module,
        parts: RunParts,
        recovery: Recovery,
        *,
        objective: Measured | None,
        backups: Backups,
        anomaly_mode: AnomalyMode,
        evaluation_loss: EvaluationLoss,
        direct_steps: DirectStepCheck,
        verify_after: int,
        seed: int,
        drill: Drill | None,
        stop: Callable[[], bool],
    ) -> None:
        """`model` is called in the training loop; without an `objective` the loop makes the loss."""
        self.model, self.objective, self.seed, self.drill = model, objective, seed, drill
        self.world, self.clock, self.samples, self.state = parts.world, parts.clock, parts.samples, parts.state
        self.stopped = False  # before its last update, because of a request
        self.newest: Vitals | None = None  # the newest update whose verdict is known
        self.metrics = MetricsLog(self.world, self.world.device)
        self._parts, self._recovery = parts, recovery
        self._keeper, self._controls = recovery.keeper, recovery.controls
        self._updater, self._ring, self._checks, self._scans = parts.updater, parts.ring, parts.checks, parts.scans
        self._backups, self._anomaly_mode, self._evaluation_loss = backups, anomaly_mode, evaluation_loss
        self._sizer = MicroBatchSizer(recovery)
        self._examination = Examination(self.world, self.clock, self._scans, backups)
        self._direct_steps, self._verify_after, self._stop = direct_steps, verify_after, stop
        self._begun: _Begun | None = None
        self._newest_begun: _Begun | None = None
        self._in_flight: _InFlight | None = None
        self._handed: Any = None  # the batch that the loop has got
        self._losses: list[torch.Tensor] = []
        self._reported: list[Metrics] = []
        self._has_begun = self._is_described = self._is_checked = False

    # The loop over updates.

    def updates_until(self, last: int, *, plan: int | None) -> Iterator[Any]:
        """Yield micro-batches, on the device, until `last` updates are accepted, or a stop is requested.

        At the end of the `plan` the run has to be back where it was before its trouble.
        """
        progress = self._keeper.progress
        while self._continues(last, is_plan=last == plan):
            if self.drill is not None and self.drill.strikes_at(self.clock.tick + 1) and not self.settle():
                continue  # the fault strikes once, so not in an update that is dropped for the sake of the last one
            self._snapshot()
            start = self.samples.next_start  # known before they are fetched: that may take for ever
            progress.updating(self.clock.tick + 1, self.clock.step, start, start + self.samples.slicing.samples)
            with self._failing():
                update = self._recovery.next_update()
            self._begin(update)
            for number, batch in enumerate(update.batches, start=1):
                yield from self._fed(batch, is_last=number == len(update.batches))
                if self._begun is None:
                    break  # dropped, or made to the end
                if len(self._losses) < number:
                    raise TrainError("a batch was not handed back: call guard.step(batch), or guard.update(loss)")

    def _continues(self, last: int, *, is_plan: bool) -> bool:
        """Say whether another update comes before `last`; there the newest is heard and everything scanned first."""
        if self._stop():
            self._updater.agreement.set_flag(Flag.STOP)
            if self.world.size == 1:
                self.settle()
                self.stopped = True
        if self.stopped:
            return False
        if self.attempted_step < last:
            return True
        if not (self.settle() and self.clock.step >= last):
            return self.clock.step < last
        anomaly = self._examine_now()
        if anomaly is None and self.newest is not None and is_plan:
            anomaly = self._checks.at_end(self.newest)
            if anomaly is None and self._recovery.is_unrecovered():
                anomaly = self._checks.not_recovered(self.newest)
        if anomaly is not None:
            place = self.samples.position
            self._treat(anomaly, self._newest_begun.update if self._newest_begun else Update(place, place, []))
        return self.clock.step < last

    def _snapshot(self) -> None:
        """Keep the state between two updates, now that the loop has done what it does after one, such as averaging."""
        self._updater.require_groups()  # before anything rewinds or is copied without a new one
        step = self.attempted_step
        if not self._ring.is_due(step):
            return
        if self._in_flight is None:
            self._controls.snapshot(step)
        elif (snapshot := self._ring.take(step)) is not None:  # None: taken before the loop was left
            self._in_flight.snapshot = snapshot

    def _begin(self, update: Update) -> None:
        self._losses.clear()
        self._reported.clear()
        knobs = self._controls.knobs.values
        self._parts.precision.set(higher=knobs.higher_precision)
        numerics.raise_eps(knobs.eps)
        begun = _Begun(update, self.clock.tick + 1, self.attempted_step + 1, self._backups.take(), [], time.monotonic())
        self._begun = self._newest_begun = begun
        EngineGuard._newest = id(begun)
        self._keeper.progress.updating(begun.tick, self.clock.step, update.start, update.stop)
        if self.drill is not None:
            self.drill.between_updates(self._place(), self.state.model, self._updater.optimizers)
        self._scans.arm(self.attempted_step)
        # Training randomness is a function of the place in the stream: a repeated update repeats its dropout.
        seed_all(mix(Purpose.UPDATE, self.seed, update.start, self.world.rank), self.world.device)

    def _fed(self, batch: Any, *, is_last: bool) -> Iterator[Any]:
        """Yield one micro-batch while gradients stay here, if they may: they travel between ranks once an update."""
        assert self._begun is not None
        if self.drill is not None:
            batch = self.drill.on_batch(self._place(), batch)
        self._begun.fed.append(batch)  # where it lies already: on a device it would be kept for two updates
        self._handed = batch = self.world.on_device(batch)
        # Where weights are spread they go to their owners at once: to wait, each rank would have to hold all of them.
        stays_here = self.world.size > 1 and not is_last and not self.state.is_sharded
        waits = self.world.accelerator.no_sync(self.model) if stays_here else nullcontext()
        with waits, self._direct_steps.running("loop"), self._anomaly_mode.without_nan_check():
            yield batch

    # What the loop hands back.

    def step(self, batch: Any) -> bool:
        """Forward, backward, gate, update. Says whether an update was attempted: not while gradients accumulate."""
        if self.objective is None:
            raise TypeError("guard.step needs an objective; without one make the loss and call guard.update(loss)")
        begun = self._require_batch("step")
        if batch is not self._handed:
            begun.fed[-1] = batch  # as the loop has made it of the one it got
        begun.versions.append(versions(begun.fed[-1]))
        try:
            loss, metrics = self.objective.for_training(self.model, batch)
            if self.drill is not None:
                loss = self.drill.on_loss(self._place(), loss)
            self._anomaly_mode.backward(loss)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            evidence = memory_evidence(error, self.world.device)
        else:
            self._reported.append(metrics)
            if not self._losses:
                self._evaluation_loss.compare(begun.step, loss, partial(self.objective, self.model, batch))
            return self.update(loss)
        self._sizer.make_smaller(begun.step, evidence)  # here, where the error holds on to nothing any longer
        self._begun = None
        self._roll_back(begun)
        self._sizer.note_smaller(begun.step, evidence, began=begun.began)
        return False

    def update(self, loss: torch.Tensor) -> bool:
        """Take over after the loop's own forward and backward of a batch."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
            raise TypeError(f"guard.update takes the loss as a scalar tensor, not one of {what}")
        begun = self._require_batch("update")
        # Rows that could not be fetched: every rank has to hear of it, and this is the way that all trouble takes.
        loss = torch.full_like(loss, math.nan) if begun.update.failed else loss.detach()
        self._losses.append(loss if loss.dtype is torch.float32 and loss.dim() == 0 else loss.float().reshape(()))
        if len(self._losses) < self.samples.slicing.accumulation:
            return False
        if all(weight.grad is None for weight in self._updater.weights):
            raise TrainError("no weight has a gradient: call accelerator.backward(loss) before guard.update(loss)")
        with self._direct_steps.running("guard"):
            return self._conclude()

    def settle(self) -> bool:
        """Hear the verdict on the last update now. False: it was an anomaly, and has been treated."""
        if self._begun is not None:
            raise TrainError("guard.settle belongs between two updates: hand the batch over first")
        self._seed_between(self.samples.position)
        self._keeper.progress.turned_to(Doing.BETWEEN)
        return self._judge_in_flight()

    def _conclude(self) -> bool:
        """The fixed point between backward and optimizer: hear of the last update, then send this one to the gate."""
        begun, self._begun = self._begun, None
        assert begun is not None
        if not self._judge_in_flight(begun):
            return False
        if self.stopped:
            self._roll_back(begun)
            return False
        if self.drill is not None:
            self.drill.on_gradients(self._place(), self._updater.weights)
        self._examination.launch(begun.backup)
        loss = self._losses[0] if len(self._losses) == 1 else mean(self._losses)
        rate = 1.0 if self.drill is None else self.drill.rate_factor(self._place())
        self._ring.before_change()
        agreement, controls = self._updater.agreement, self._controls
        agreement.set_flag(Flag.BUSY, self._keeper.is_busy)
        digest = 0 if agreement.is_alone else controls.digest(begun.update.start, self._recovery.incident_log)
        attempt = self._updater.apply(self.clock.step, loss, controls.knobs.values, rate=rate, digest=digest)
        if attempt.restarts:  # a schedule that starts again makes the loss jump on purpose
            self._checks.expect(self.clock.step + 1)
        self.clock.tick += 1
        sent, metrics = Sent(attempt.measured, attempt.numbers), mean_metrics(self._reported)
        self._in_flight = _InFlight(begun, attempt, loss, self._updater.gate.limits, sent, metrics)
        return True

    # One verdict, an update later.

    def _judge_in_flight(self, begun: _Begun | None = None) -> bool:
        """Judge the update in flight. False: there was trouble, and `begun` is not to land."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return True
        update, lr = flight.begun.update, flight.attempt.settings[0][0]["lr"]
        vitals = read_vitals(
            *(flight.begun.tick, self.clock.step, update.start, update.stop, lr),
            flight.sent.read(),
            flight.limits,
            has_scale=self._updater.scaler is not None,
            is_busy=flight.attempt.is_busy,
            pace=flight.attempt.pace,
            by_rank=flight.attempt.rows_by_rank,
        )
        if not vitals.alike:
            with self._failing():
                digests = [row[DIGEST] for row in flight.attempt.rows_by_rank()]
                self._recovery.ranks_differ(digests, began=flight.begun.began)
        self.newest = vitals
        self.stopped |= vitals.stop_asked
        self.metrics.note(flight.metrics)
        finding = self._checks.judge(vitals)
        for remark in (*finding.remarks, *self._scans.remarks()):
            log.info("note: %s", remark)
        self._set_limits()
        self._recovery.add_vitals(vitals)
        if vitals.accepted:
            self.clock.step += 1
            self._updater.accept(self.clock.step)
            norm = self._updater.clipped(vitals.grad_norm, flight.attempt.max_norm)
            self._scans.landed(self.clock.step, flight.attempt.settings, norm)
            if flight.snapshot is not None:
                flight.snapshot.statistics = self._parts.statistics()
        elif flight.snapshot is not None:
            self._ring.drop(flight.snapshot)
        scanned = self._examination.verdict()
        self._name_guilty_ranks()
        anomaly = scanned or finding.anomaly or self._recovery.explainer.foresee(vitals, flight.begun.fed)
        if anomaly is None and not finding.repeat:
            self._healthy(flight, vitals)
            return True
        if not vitals.accepted:
            self._updater.undo(flight.attempt)
        self._updater.drop_gradients()
        if (first := begun if vitals.accepted else flight.begun) is not None:
            self._roll_back(first)
        if anomaly is not None:
            fed, examination = flight.begun.fed, self._examination
            spiked = not float(flight.loss) <= flight.limits[0]
            refined = scanned or examination.refine_signal(anomaly, fed, update.failed, spiked=spiked)
            self._name_guilty_ranks()
            was_modified = flight.begun.versions != [versions(batch) for batch in fed]
            usual = examination.nan_is_usual
            refused = None if vitals.accepted else Refused(update, fed, flight.limits, was_modified, usual)
            self._treat(refined, update, refused, began=flight.begun.began)
        return False

    def _healthy(self, flight: _InFlight, vitals: Vitals) -> None:
        self._backups.let_go(flight.begun.backup)
        if not vitals.accepted:
            return
        step, recovery, keeper = self.clock.step, self._recovery, self._keeper
        recovery.update_accepted(was_limited=flight.attempt.is_limited)
        self._on_accepted()
        if not self._is_checked:  # optimizers make their state in their first step
            keeper.check()
            self._is_checked = True
        if flight.snapshot is not None:
            flight.snapshot.remedies = self._controls.state_dict()
        is_back = self._checks.is_only_reported or self._checks.rewind_check.is_at_reference(step)
        scanned = self._scans.clean_step
        self._ring.verify(healthy_until=step, scanned_until=scanned, after=self._verify_after, is_back=is_back)
        keeper.verified(any_busy=vitals.any_busy)
        recovery.note_saves()
        recovery.note_data(flight.begun.update)
        if step == 1 and not self._is_described:
            self._is_described = True
            if self.objective is None:
                warn_of_scalers(self._updater.scaler)
            log.info("%s", self._ring.describe())  # its size is known now that the optimizer has its moments
            self._examination.learn_usual_batches(flight.begun.fed)

    def _treat(
        self, anomaly: Anomaly, update: Update, refused: Refused | None = None, *, began: float | None = None
    ) -> None:
        if began is None and self._newest_begun is not None:
            began = self._newest_begun.began
        with self._failing():
            self._recovery.treat(anomaly, update, refused, began=began)
        self._set_limits()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (GaveUp, RanksDiffer, StorageFailed) as error:
            self._on_failure(error)
            raise

    def _roll_back(self, begun: _Begun) -> None:
        """Take back an update: its gradients, what forwards did to buffers, and the place in the data."""
        self._updater.drop_gradients()
        self._seed_between(begun.update.start)
        self._backups.put_back(begun.backup)
        self.samples.go_back(begun.update)

    def _put_back_batch(self) -> None:
        """Undo what was begun when a loop is left with a batch in hand: it comes again if the loop is entered again."""
        if self._begun is not None:
            self._roll_back(self._begun)
            self._begun = None

    def _examine_now(self) -> Anomaly | None:
        found = self._examination.examine_now()
        self._name_guilty_ranks()
        return found

    def _name_guilty_ranks(self) -> None:
        if guilty := self._examination.guilty_ranks():
            self._recovery.name_guilty_ranks(guilty)

    def _on_accepted(self) -> None:
        """Called after each healthy update: it has to be cheap most of the time."""

    def _on_failure(self, error: TrainError) -> None:
        """Called with an error that ends the run, before it is raised."""

    def stop_now(self) -> None:
        """End the loop before its next update."""
        self.stopped = True

    @property
    def attempted_step(self) -> int:
        """Accepted updates, the one whose verdict is pending included."""
        return self.clock.step + (self._in_flight is not None)

    def _require_batch(self, verb: str) -> _Begun:
        """Return the update whose batch the loop is handing back; raise where there is none."""
        if not self._has_begun:
            raise TrainError(f"guard.{verb} before the loop: iterate over guard.batches(), which makes the batches")
        if self._begun is None or len(self._losses) >= len(self._begun.fed):
            raise TrainError(_TWICE.format(verb=verb))
        if EngineGuard._newest != id(self._begun):
            raise TrainError(_TWO_GUARDS)
        return self._begun

    def _place(self) -> Place:
        begun = self._newest_begun
        assert begun is not None
        return Place(begun.tick, begun.step, begun.update.start, len(self._losses), self.world.rank)

    def _seed_between(self, position: int) -> None:
        """At rest random numbers are a function of the place, too: an update that was undone leaves no trace."""
        seed_all(mix(Purpose.BETWEEN, self.seed, position, self.world.rank), self.world.device)

    def _set_limits(self) -> None:
        """Hand what the checks allow to the gate."""
        self._updater.gate.limit(*self._checks.limits)


_IN_TURN = (
    "losses that are stepped in turn, as in a GAN, are not supported; "
    "add them up and give one guard all optimizers, which then step together"
)
_TWICE = f"guard.{{verb}} was called twice for one batch: {_IN_TURN}"
_TWO_GUARDS = f"two guards are at work in turn: {_IN_TURN}"
