"""One update, from its samples to the gate, and the verdict on the previous one.

k+1: take samples -> forward and backward of each micro-batch
     -> read the verdict on k, measured an update ago: an anomaly stops here, before k+1 changes a weight
     -> gate k+1 on the device -> optimizer step -> start copying its measurements to the host

`updates_until` yields batches, `step` or `update` takes them back, `_send_to_gate` and `_judge_pending` do the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from resilient_train.computation import Loop
from resilient_train.data.samples import Update
from resilient_train.drills import Drill, UpdatePlace
from resilient_train.errors import TrainError
from resilient_train.lost_device import LostDevice
from resilient_train.micro_batches import MicroBatchSizer
from resilient_train.record.progress import Doing
from resilient_train.recovery import Recovery
from resilient_train.run_parts import RunParts
from resilient_train.state.copies import Backup
from resilient_train.transaction import Transaction
from resilient_train.types import Anomaly, Signal, UpdateResult, Vitals
from resilient_train.update.objective import Metrics, scalar
from resilient_train.update.turns import MISSING, TWICE, TWO_GUARDS, why_no_gradient
from resilient_train.watch.examination import Examination
from resilient_train.watch.vitals import landed, mean, mean_metrics, versions
from resilient_train.wording import log


class EngineGuard:
    """Runs updates through the gate and passes every anomaly to Recovery."""

    _newest: ClassVar[int] = 0  # id of the update that any guard of this process began last
    _place: UpdatePlace  # of the newest update, for drills

    def __init__(
        self, parts: RunParts, recovery: Recovery, loop: Loop, *, verify_after: int, drill: Drill | None
    ) -> None:
        self.model, self.objective, self.seeds, self.drill = loop.model, loop.objective, loop.seeds, drill or Drill(())
        self.world, self.clock, self.samples, self.state = parts.world, parts.clock, parts.samples, parts.state
        self.stopped = False  # if True, the loop ends before its next update
        self.newest: Vitals | None = None  # the newest update whose verdict is known
        self.metrics: Metrics = {}  # of that update
        self._parts, self._recovery = parts, recovery
        self._keeper, self._controls = recovery.keeper, recovery.controls
        self._updater, self._ring, self._checks, self._scans = parts.updater, parts.ring, parts.checks, parts.scans
        self._turn, self._backups = parts.updater.turn, loop.backups
        self._loop, self._lost_device = loop, LostDevice(parts, recovery, loop.objective)
        self._sizer, self._direct_steps, self._verify_after = MicroBatchSizer(recovery), loop.direct_steps, verify_after
        self._examination = Examination(self.world, self.clock, self._checks, self._scans, loop.backups)
        self._current: Transaction | None = None  # it is being computed
        self._newest_update: Update | None = None  # the newest that was begun
        self._pending: Transaction | None = None  # its verdict is
        self._refused: Backup | None = None  # the buffers, and what is kept, when the newest update was refused
        self._handed_out: Any = None  # the batch that the loop has now
        self._has_begun = self._has_accepted = self._waits = False
        self._is_dropped = False  # the newest update, whose losses come in turn

    # The loop over updates.

    def updates_until(self, last: int, *, plan: int | None) -> Iterator[Any]:
        """Yield micro-batches until `last` updates are accepted; at the end of the `plan` the loss has to be back."""
        progress = self._keeper.progress
        while self._continues(last, is_plan=last == plan):
            if self._parts.updates.has_turns and self._pending is not None:  # of an update of another kind
                self.settle()
            if self.drill.strikes_at(self.clock.tick + 1) and not self.settle():
                continue  # a drill fires once: wait for the pending verdict, which could drop the update
            step, tries_rates = self.clock.step, self._controls.trials.tries_rates
            if tries_rates and self._checks.asks_for_rates(step, self._ring.travelled) and self.settle():
                self._recovery.try_rates()
            # Take the snapshot here, after the loop's own code for the last update (for example an EMA) has run.
            if self._ring.is_due(step := self.attempted_step):
                self._updater.adopt_groups()  # first: the schedule is in the copy
                if self._pending is None:
                    self._controls.snapshot(step)
                elif (snapshot := self._ring.take(step)) is not None:  # None: it has a snapshot already, or no slot
                    self._pending.snapshot = snapshot
            start = self.samples.next_start  # noted before they are fetched: a data set may hang
            stop = start + self.samples.slicing.samples
            progress.updating(self.clock.tick + 1, self.clock.step, start, stop)
            update = self._recovery.next_update()
            if (update.start, update.stop) != (start, stop):  # samples before them are left out
                progress.updating(self.clock.tick + 1, self.clock.step, update.start, update.stop)
            self._begin(update)
            for number, batch in enumerate(update.batches, start=1):
                yield from self._hand_out(batch, is_last=number == len(update.batches))
                if self._turn.has_stepped:
                    self.settle()
                if self._current is None:
                    self._undo_loop()
                    break  # it was dropped, or is complete
                if len(self._current.losses) < number:
                    raise TrainError(MISSING)

    def _continues(self, last: int, *, is_plan: bool) -> bool:
        """Say whether another update follows. After the last one, wait for its verdict and scan everything first."""
        if self._loop.stop():
            self._updater.agreement.ask_to_stop()  # several ranks stop together, an update later
            if self.world.size == 1:
                self.settle()
                self.stopped = True
        if self.stopped:
            return False
        if self.attempted_step >= last and self.settle() and self.clock.step >= last:
            self.examine(is_end=is_plan)
            if is_plan and self.attempted_step >= last and self._recovery.is_unrecovered():  # treated, not rewound
                self._recovery.end(self._recovery.end_unrecovered())
        return self.attempted_step < last

    def examine(self, *, is_end: bool = False) -> bool:
        """Scan everything now, at the end also the whole loss. False: an anomaly was treated, not only observed."""
        anomaly = self._examination.examine_now()
        if anomaly is None and self.newest is not None and is_end:
            anomaly = self._checks.at_end(self.newest)
            if anomaly is None and self._recovery.is_unrecovered():
                anomaly = self._checks.not_recovered(self.newest)
        if anomaly is not None and not self._recovery.counts(anomaly):
            place = self.samples.position
            self._recovery.treat(anomaly, self._newest_update or Update(place, place, []))
        return anomaly is None or self._recovery.observes

    def _begin(self, update: Update) -> None:
        self._turn.begin()
        self._is_dropped = False
        self._parts.precision.set(higher=self._controls.knobs.higher_precision > 0)
        tick, backup = self.clock.tick + 1, self._backups.take()
        self._current = begun = Transaction(update, tick, self.attempted_step + 1, backup)
        self._newest_update = update
        self._place = UpdatePlace(tick, begun.step, self.world.rank)
        self._lost_device.begins(update)
        EngineGuard._newest = id(begun)
        if self.drill.strikes_at(tick):
            self._ring.copier.before_change()  # a device may still be copying what it spoils
        self.drill.between_updates(self._place, self.state.model, self._updater.optimizers)
        self._scans.arm(self.attempted_step)
        self.seeds.for_update(update.start)

    def _hand_out(self, batch: Any, *, is_last: bool) -> Iterator[Any]:
        """Yield one micro-batch to the loop; with the last one gradients are reduced over the ranks."""
        assert self._current is not None
        batch = self.drill.on_batch(self._place, batch)
        self._current.versions.append(versions(batch))
        self._current.inputs.append(batch)  # the host batch: a device batch would occupy memory for two updates
        with self._lost_device:
            self._handed_out = batch = self.world.on_device(batch)
        # Sharded gradients cannot wait: each rank would have to hold all of them. Trainers make them wait themselves.
        can_wait = self.world.size > 1 and not is_last and not (self.state.is_sharded or self.samples.is_fed)
        waiting = self.world.accelerator.no_sync(self.model) if can_wait else nullcontext()
        with waiting, self._direct_steps.running("loop"), self._loop.anomaly_mode.without_nan_check():
            yield batch

    # What the loop hands back.

    def step(self, batch: Any) -> UpdateResult:
        """Forward, backward, gate, update. Says what became of it: false while gradients accumulate, or if refused."""
        if self.objective is None:
            raise TypeError("guard.step needs an objective; without one make the loss and call guard.update(loss)")
        begun = self._require_batch("step")
        if batch is not self._handed_out:
            begun.inputs[-1] = batch  # the loop has changed it
        begun.versions[-1] = versions(begun.inputs[-1])
        begun.attributes = begun.attributes if begun.losses else self._backups.attributes()
        spoil = partial(self.drill.on_loss, self._place)
        with self._lost_device:
            computed = self._loop.compute(batch, begun, self._pending, spoil)
        if not isinstance(computed, str):
            loss, metrics = computed
            begun.reported.append(metrics)
            return self.update(loss)
        self._sizer.make_smaller(begun.step, computed)
        self._current = None
        self._discard(begun)
        self._sizer.note_smaller(begun.step, computed)
        return UpdateResult("refused")

    def update(self, loss: torch.Tensor, *, optimizer: Any = None) -> UpdateResult:
        """Continue after the loop's own forward and backward; with `optimizer` the loss is its own, and it steps."""
        loss, given = self._parts.buffers.spoil(scalar(loss)), loss
        if self._is_dropped and optimizer is not None:
            self._updater.drop_gradients()
            return UpdateResult("refused")
        begun = self._require_batch("update")
        self._turn.take(optimizer, self.samples.slicing.accumulation, self.objective)
        # Rows that could not be fetched, and exceptions, make it NaN: so every rank learns of them and refuses it.
        loss = torch.full_like(loss, math.nan) if begun.update.failed or begun.raised else loss
        if optimizer is None:
            begun.losses.append(loss)
            if len(begun.losses) < len(begun.update.batches):
                return UpdateResult("accumulating")
            loss = loss if len(begun.losses) < 2 else mean(begun.losses)
        weights = self._turn.weights or self._updater.weights
        if all(weight.grad is None for weight in weights):
            raise TrainError(why_no_gradient(given, weights))
        with self._direct_steps.running("guard"), self._lost_device:
            result = self._send_to_gate(begun, loss)
            if self._waits and self._pending is not None:  # the loop's code for what it keeps sees no refused update
                self.settle()
                self._refused = None if result else self._backups.take()
        return result

    def _require_batch(self, verb: str) -> Transaction:
        if not self._has_begun:
            raise TrainError(f"guard.{verb} before the loop: iterate over guard.batches(), which makes the batches")
        if (current := self._current) is None or len(current.losses) >= len(current.inputs):
            raise TrainError(TWICE.format(verb=verb))
        if EngineGuard._newest != id(current):
            raise TrainError(TWO_GUARDS)
        return current

    def _send_to_gate(self, begun: Transaction, loss: torch.Tensor) -> UpdateResult:
        """Between backward and optimizer: read the verdict on the last update, then send this one through the gate.

        All ranks do this at the same point. Nothing waits for the device: the last update was measured long ago.
        """
        turn, self._current = self._turn, None
        if not self._judge_pending(begun):
            self._is_dropped = turn.current is not None
            return UpdateResult("refused")
        if turn.current is None and self.stopped:
            self._discard(begun)
            return UpdateResult("refused")
        if not turn.has_stepped:
            self._examination.launch(begun.before)
        self.drill.on_gradients(self._place, turn.weights or self._updater.weights)
        rates = self._checks.rate_factor(self.attempted_step + 1), self.drill.rate_factor(self._place)
        self._ring.copier.before_change()
        self._updater.gate.limit(*self._checks.limits)
        attempt = self._updater.apply(self.clock.step, loss, self._controls.knobs.values, rates=rates)
        if turn.current is None:
            return self._end_update(begun)
        self._current, self._parts.updates.has_turns = begun, True
        begun.result = begun.result or UpdateResult("pending", attempt.loss.detach())
        return begun.result if turn.is_complete else UpdateResult("accumulating")

    def _end_update(self, begun: Transaction) -> UpdateResult:
        self._current = None
        if self._turn.has_stepped:
            self._updater.end()
        if self._updater.has_new_weights():
            self._checks.more_is_trained(self.clock.step + 1)
        self.clock.tick += 1
        self._pending = begun
        return begun.send(self._updater.newest, self._updater.gate.limits)

    # The verdict, an update later.

    def settle(self) -> bool:
        """Wait for the verdict on the last update; a turn ends with it. False: an anomaly, and it has been treated."""
        if self._current is not None:
            if not self._turn.has_stepped:
                raise TrainError("guard.settle belongs between two updates: hand the batch over first")
            self._end_update(self._current)
        self.seeds.between(self.samples.position)
        self._keeper.progress.turned_to(Doing.BETWEEN)
        with self._lost_device:
            return self._judge_pending()

    def _judge_pending(self, begun: Transaction | None = None) -> bool:
        """Judge the pending update. False: anomalous, or it must be retried; the next update, `begun`, is dropped."""
        judged, self._pending = self._pending, None
        if judged is None:
            return True
        before = self.clock.step
        is_clear = self._judge(judged, begun)
        assert judged.result is not None
        judged.result.status = "accepted" if self.clock.step > before else "refused"  # a rewind goes back
        return is_clear

    def _judge(self, judged: Transaction, begun: Transaction | None) -> bool:
        update, inputs, attempt = judged.update, judged.inputs, judged.attempt
        vitals = judged.read(self.clock.step, has_scale=self._updater.scaler is not None)
        finding = self._checks.judge(vitals)
        observes = self._recovery.observes
        if observes:  # the checks have learned nothing from it, as if it was refused
            vitals = landed(vitals)
        self.newest = vitals
        self.stopped |= vitals.stop_asked
        self.metrics = mean_metrics(judged.reported)
        self._parts.updates.add(vitals)  # refused ones too: they may turn out to have caused a later incident
        scanned = self._examination.verdict()  # of the state before this update
        if self._recovery.intended.accept_written():
            losses = self._parts.updates.recent_measurements()[0]
            finding = self._checks.after_change(vitals, finding, losses)
        # The gate has accepted it on the device; only now the host knows.
        was_half = not (vitals.accepted or observes) and self._turn.undo()
        self._turn.land()
        if vitals.accepted:
            self.clock.step += 1
            self._updater.accept(self.clock.step)
            norm = self._updater.clipped(vitals.grad_norm, attempt)
            self._scans.landed(self.clock.step, attempt.settings, norm, attempt.times)
            if judged.snapshot is not None:
                judged.snapshot.checks_state = self._parts.checks_state()
        elif judged.snapshot is not None:
            self._ring.drop(judged.snapshot)
        explainer = self._recovery.explainer
        anomaly = scanned or finding.anomaly or explainer.check_first_updates(vitals, inputs)
        if anomaly is None and finding.at_any_scale and explainer.breaks_at_any_scale(judged):
            anomaly = finding.at_any_scale
        if anomaly is not None and observes:
            anomaly = replace(anomaly, landed=anomaly.landed or vitals.accepted)  # a loss scale may have refused it
            if not self._recovery.counts(anomaly):
                self._recovery.treat(self._refined(anomaly, judged, is_scanned=scanned is not None), update)
            self._backups.let_go(judged.before)
            self._on_accepted()
            return True
        if anomaly is None and (observes or not finding.repeat):
            is_overflow = vitals.overflowed and not observes
            if was_half or (is_overflow and (judged.before.tables or judged.before.kept)):
                # Buffers may be NaN since its forward, and the next one has used them, or half an update: repeat that.
                if begun is not None:
                    self._discard(begun)
                self._backups.put_back(judged.before, with_scale=False)
                return begun is None
            self._backups.let_go(judged.before)
            if vitals.accepted:
                self._after_accepted(judged)
            return True
        # Trouble. Undo the refused update and the next one, then treat it.
        if not vitals.accepted:
            self._updater.undo(attempt)
        self._updater.drop_gradients()
        if (first := begun if vitals.accepted else judged) is not None:
            self._discard(first)
            self._backups.set_attributes(judged.attributes, only_lost=True)
        if anomaly is not None:
            refined = self._refined(anomaly, judged, is_scanned=scanned is not None)
            judged.nan_is_usual, judged.is_error = self._checks.nan_is_usual, refined.signal is Signal.EXCEPTION
            self._recovery.treat(refined, update, None if vitals.accepted else judged)
        return False

    def _refined(self, anomaly: Anomaly, judged: Transaction, *, is_scanned: bool) -> Anomaly:
        spiked = not float(judged.attempt.loss) <= judged.limits[0]
        what = judged.inputs, judged.update.failed, judged.raised, judged.attempt.norms
        return self._examination.refine_signal(
            anomaly, *what, spiked=spiked, is_scanned=is_scanned, has_landed=self._recovery.observes
        )

    def _after_accepted(self, accepted: Transaction) -> None:
        step, recovery, keeper = self.clock.step, self._recovery, self._keeper
        recovery.update_accepted(accepted.update, was_limited=accepted.attempt.is_limited)
        self._on_accepted()
        is_first, self._has_accepted = not self._has_accepted, True
        if is_first:  # optimizers create their state in their first step
            keeper.check()
        if is_first and (step == 1 or not self._checks.knows_usual_batches):
            self._examination.learn_usual_batches(accepted.inputs)
        if accepted.snapshot is not None:
            accepted.snapshot.effects = self._controls.effects.state_dict()
        episode = self._checks.episode
        is_back = episode.is_at_reference(step) or (episode.is_only_reported and not recovery.observes)
        scanned, after, self._ring.best_step = self._scans.clean_step, self._verify_after, self._checks.best.step
        self._ring.verify(healthy_until=step, scanned_until=scanned, after=after, is_back=is_back)
        self.samples.forget_before(self._ring.oldest_position(accepted.update.start))
        keeper.verified()
        if is_first and step == 1:
            log.info("%s", self._ring.describe())  # its size is known now that the optimizer has its moments

    def _discard(self, begun: Transaction) -> None:
        """Give an update up: undo its steps, what its forwards have changed, and its place in the data."""
        self._turn.undo()
        self._updater.drop_gradients()
        self.seeds.between(begun.update.start)
        self._backups.put_back(begun.before)
        self.samples.go_back(begun.update)

    def _put_back_batch(self) -> None:
        """Undo an update whose loop was left: its batch comes again when the loop is entered again."""
        self._undo_loop()
        if self._current is not None and self._turn.is_complete:
            self._end_update(self._current)
        elif self._current is not None:
            self._discard(self._current)
            self._current = None

    def _undo_loop(self) -> None:
        """Undo what the loop did with what it keeps after an update that was refused."""
        if (refused := self._refused) is not None:
            self._refused = None
            self._backups.put_back(refused)
            self._backups.let_go(refused)
            self._updater.drop_gradients()
            self.seeds.between(self.samples.position)

    @property
    def attempted_step(self) -> int:
        """Accepted updates, including the one whose verdict is pending."""
        return self.clock.step + (self._pending is not None)

    # What the public guard adds.

    def _on_accepted(self) -> None:
        """Called after each healthy update: it has to be cheap most of the time."""
