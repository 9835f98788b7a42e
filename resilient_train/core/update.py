"""One update, from its samples to the gate, and the verdict on the previous one.

k+1: take samples -> forward and backward of each micro-batch
     -> read the verdict on k, measured an update ago: an anomaly stops here, before k+1 changes a weight
     -> gate k+1 on the device -> optimizer step -> start copying its measurements to the host

`updates_until` yields batches, `step` or `update` takes them back, `_send_to_gate` and `_judge_pending` do the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from resilient_train.core.mark import Mark, Marks
from resilient_train.core.protocols import Backend, Computed, Parts, Retry, Store
from resilient_train.core.randomness import Seeds
from resilient_train.core.recovery import Recovery
from resilient_train.core.state import weights_of
from resilient_train.core.transaction import Transaction, Update
from resilient_train.core.updater import Attempt
from resilient_train.core.vitals import Metrics, landed, mean, scalar, versions
from resilient_train.ground.errors import TrainError
from resilient_train.ground.types import UpdateResult, Vitals


class EngineGuard:
    """The story of each update. `loop.guard.Guard`, which loops call, begins and ends it."""

    def __init__(
        self,
        parts: Parts,
        recovery: Recovery,
        backend: Backend,
        marks: Marks,
        store: Store,
        seeds: Seeds,
        *,
        fetch: Callable[[], Update],
        verify_after: int,
        stop: Callable[[], bool],
    ) -> None:
        """`fetch` returns the next update's samples, `stop` whether to stop."""
        self.model, self.objective, self.seeds = backend.model, backend.objective, seeds
        self.world, self.clock, self.samples, self.state = parts.world, parts.clock, parts.samples, parts.state
        self.stopped = False  # if True, the loop ends before its next update
        self.newest: Vitals | None = None  # the newest update whose verdict is known
        self.reported: Sequence[Metrics] = ()  # by the objective, of that update
        self._parts, self._recovery = parts, recovery
        self._controls, self._intentions = recovery.controls, recovery.intentions
        self._backend, self._marks, self._examination, self._store = backend, marks, parts.examiner, store
        self._updater, self._ring, self._checks, self._scans = parts.updater, parts.ring, parts.checks, parts.scans
        self._turn, self._verify_after = parts.updater.turn, verify_after
        self._fetch, self._stop, self._on_error = fetch, stop, parts.on_error
        self._hooks = [*parts.hooks, *parts.on_error]
        self._current: Transaction | None = None  # it is being computed
        self._pending: Transaction | None = None  # its verdict is
        self._newest: Transaction | None = None  # the newest that was begun
        self._refused: Mark | None = None  # of the end of the newest update, when it was refused
        self._handed_out: Any = None  # the batch that the loop has now
        self._computing = ExitStack()  # what surrounds its forward and backward
        self._has_begun = False
        self._waits = False  # the loop reads the verdict at once, as its own code must not see a refused update

    def updates_until(self, last: int, *, plan: int | None) -> Iterator[Any]:
        """Yield micro-batches until `last` updates are accepted; at the end of the `plan` the loss has to be back."""
        while self._continues(last, is_plan=last == plan):
            self.prepare()
            if self.stopped:  # as a hook has learned from the last update
                break
            # Take the snapshot here, after the loop's own code for the last update (for example an EMA) has run.
            if self._ring.is_due(step := self.attempted_step):
                self._adopt()  # first: the schedule is in the copy
                if self._pending is None:
                    self._controls.snapshot(step)
                elif (snapshot := self._ring.take(step)) is not None:  # None: it has a snapshot already, or no slot
                    self._pending.snapshot = snapshot
            begun = self._begin(self._fetch())
            for number, batch in enumerate(begun.update.batches, start=1):
                yield from self._hand_out(begun, batch, is_last=number == len(begun.update.batches))
                if self._current is not begun:  # it was dropped, or is complete
                    self._undo_loop()
                    break
                if len(begun.losses) < number:
                    raise TrainError(MISSING)
            if self._turn.has_stepped:
                self.settle()

    def prepare(self) -> None:
        """Let hooks do what they do before an update: they may take the run back."""
        for hook in self._hooks:
            hook.before_update()

    def _continues(self, last: int, *, is_plan: bool) -> bool:
        """Say whether another update follows. After the last one, wait for its verdict and scan everything first."""
        if self._stop():
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
        if anomaly is None and self.newest is not None and is_end and self._recovery.is_unrecovered():
            anomaly = self._checks.not_recovered(self.newest)
        if anomaly is not None:
            place = self.samples.position
            self._recovery.treat(anomaly, self._newest.update if self._newest else Update(place, place, []))
        return anomaly is None or self._recovery.observes

    def _begin(self, update: Update) -> Transaction:
        self._turn.begin()
        begun = Transaction(update, self.clock.tick + 1, self.attempted_step + 1, self._marks.take())
        self._current = self._newest = begun
        self.seeds.for_update(update.start)
        return begun

    def _hand_out(self, begun: Transaction, batch: Any, *, is_last: bool) -> Iterator[Any]:
        """Yield one micro-batch to the loop; with the last one gradients are reduced over the ranks."""
        begun.inputs.append(batch)  # the host batch: a device batch would occupy memory for two updates
        # Sharded gradients cannot wait: each rank would have to hold all of them. Trainers make them wait themselves.
        can_wait = self.world.size > 1 and not is_last and not (self.state.is_sharded or self.samples.is_fed)
        with self.world.without_sync(self.model) if can_wait else nullcontext(), self._computing:
            for hook in self._hooks:
                self._computing.enter_context(hook.around_compute(begun))
            begun.versions.append(versions(begun.inputs[-1]))
            self._handed_out = batch = self.world.on_device(begun.inputs[-1])
            yield batch

    def step(self, batch: Any) -> UpdateResult:
        """Forward, backward, gate, update. Says what became of it: false while gradients accumulate, or if refused."""
        if self.objective is None:
            raise TypeError("guard.step needs an objective; without one make the loss and call guard.update(loss)")
        begun = self._require_batch("step")
        if batch is not self._handed_out:
            begun.inputs[-1] = batch  # the loop has changed it
        begun.versions[-1] = versions(begun.inputs[-1])
        try:
            computed: Computed | Retry = self._backend.compute(batch)
        except Exception as error:
            computed = self._instead(error, begun)
        if callable(computed):  # after the error, whose traceback held what the forward had in memory
            self._discard(begun)
            computed()
            self._refused = self._marks.take() if self._waits else None
            return UpdateResult("refused")
        loss, metrics = computed
        begun.reported.append(metrics)
        return self.update(loss)

    def _instead(self, error: Exception, begun: Transaction) -> Computed | Retry:
        """Return what takes the place of a loss that raised."""
        open_updates = [one for one in (self._pending, begun) if one is not None]
        for one in self._on_error:
            if (answer := one.loss_instead(error, open_updates)) is not None:
                return answer
        raise error

    def update(self, loss: torch.Tensor) -> UpdateResult:
        """Continue after the loop's own forward and backward of a micro-batch; the last one sends the update off."""
        begun = self._require_batch("update")
        loss = self._taken(begun, loss)
        begun.losses.append(loss)
        if len(begun.losses) < len(begun.update.batches):
            return UpdateResult("accumulating")
        loss = loss if len(begun.losses) < 2 else mean(begun.losses)
        self._require_gradient(self._updater.weights)
        result = self._send_to_gate(begun, loss)
        if self._waits and self._pending is not None:  # the loop's code for what it keeps sees no refused update
            self.settle()
            self._refused = None if result else self._marks.take()
        return result

    def step_in_turn(self, loss: torch.Tensor, optimizer: Any) -> UpdateResult:
        """Let one optimizer step with a loss of its own, after its backward; its gradients stay."""
        optimizer = self._turn.known(optimizer)
        if self._newest is not None and self._newest.is_refused:
            return UpdateResult("refused")
        is_first, begun = not self._turn.has_stepped, self._current
        if is_first or begun is None:
            begun = self._require_batch("update")
        loss = self._taken(begun, loss)
        self._require_gradient(weights_of(optimizer))
        if is_first:
            if not self._judge_pending(begun):
                return UpdateResult("refused")
            self._waits = self._parts.updates.has_turns = True
            begun.losses.append(loss)
            begun.result = UpdateResult("pending", loss)
            self._examination.launch(begun.mark)
        self._marks.fill(begun.mark, optimizer)
        self._updater.step_in_turn(optimizer, self.clock.step, loss, rates=self._set_limits())
        assert begun.result is not None
        return begun.result if self._turn.is_complete else UpdateResult("accumulating")

    def _require_batch(self, verb: str) -> Transaction:
        if not self._has_begun:
            raise TrainError(f"guard.{verb} before the loop: iterate over guard.batches(), which makes the batches")
        if (current := self._current) is None or len(current.losses) >= len(current.inputs):
            raise TrainError(TWICE.format(verb=verb))
        return current

    def _require_gradient(self, weights: Sequence[torch.Tensor]) -> None:
        self._adopt()  # what the loop has added has gradients, too
        if all(weight.grad is None for weight in weights):
            raise TrainError(NO_GRADIENT)

    def _adopt(self) -> None:
        if self._updater.adopt_groups():
            self._marks.list_modules()

    def _taken(self, begun: Transaction, loss: torch.Tensor) -> torch.Tensor:
        self._computing.close()
        loss = scalar(loss)
        # Rows that could not be fetched, and exceptions, make it NaN: so every rank learns of them and refuses it.
        return torch.full_like(loss, math.nan) if begun.update.failed or begun.raised else loss

    def _send_to_gate(self, begun: Transaction, loss: torch.Tensor) -> UpdateResult:
        """Between backward and optimizer: read the verdict on the last update, then send this one through the gate. All
        ranks do this at the same point. Nothing waits for the device: the last update was measured long ago.
        """
        if not self._judge_pending(begun):
            return UpdateResult("refused")
        if self.stopped:
            self._discard(begun)
            return UpdateResult("refused")
        self._examination.launch(begun.mark)
        return self._sent(begun, self._updater.apply(self.clock.step, loss, rates=self._set_limits()))

    def _set_limits(self) -> tuple[float, float]:
        """Set the limits of the gate; return the factors of the rate, of an experiment and of hooks."""
        self._ring.copier.before_change()
        self._updater.gate.limit(*self._checks.limits)
        of_hooks = math.prod(hook.rate_factor() for hook in self._hooks)
        return self._checks.rate_factor(self.attempted_step + 1), of_hooks

    def _sent(self, begun: Transaction, attempt: Attempt) -> UpdateResult:
        self._current = None
        if self._updater.has_new_weights:
            self._updater.has_new_weights = False
            self._checks.more_is_trained(self.clock.step + 1)
        self.clock.tick += 1
        self._pending = begun
        return begun.send(attempt, self._updater.gate.limits)

    def settle(self) -> bool:
        """Wait for the verdict on the last update; a turn ends with it. False: an anomaly, and it has been treated."""
        if self._current is not None:
            if not self._turn.has_stepped:
                raise TrainError("guard.settle belongs between two updates: hand the batch over first")
            self._sent(self._current, self._updater.end_turn())
        self.seeds.between(self.samples.position)
        return self._judge_pending()

    def _judge_pending(self, begun: Transaction | None = None) -> bool:
        """Judge the pending update. False: anomalous, or it must be retried; the next update, `begun`, is dropped."""
        judged, self._pending = self._pending, None
        if judged is None:
            return True
        before = self.clock.step
        is_clear = self._judge(judged, begun)
        judged.ends("accepted" if self.clock.step > before else "refused")  # a rewind goes back
        return is_clear

    def _judge(self, judged: Transaction, begun: Transaction | None) -> bool:
        """Read what was measured, let the checks judge it, and do what follows. `begun` was computed since."""
        vitals = judged.read(self.clock.step, has_scale=self._updater.scaler is not None)
        finding = self._checks.judge(vitals)
        observes = self._recovery.observes
        if observes:  # the checks have learned nothing from it, as if it was refused
            vitals = landed(vitals)
        self.newest = vitals
        self.stopped |= vitals.stop_asked
        self.reported = judged.reported
        self._parts.updates.add(vitals)  # refused ones too: they may turn out to have caused a later incident
        scanned = self._examination.verdict()  # of the state before this update
        finding = self._intentions.reviewed(vitals, finding)
        has_steps = not (vitals.accepted or observes) and self._marks.undo_steps(judged.mark)
        self._note_verdict(judged, vitals)
        anomaly = scanned or finding.anomaly
        if anomaly is not None and observes:
            anomaly = replace(anomaly, landed=anomaly.landed or vitals.accepted)  # a loss scale may have refused it
            self._recovery.treat(anomaly, judged.update, judged, is_scanned=scanned is not None)
            self._on_accepted()
        elif anomaly is not None or (finding.repeat and not observes):
            self._discard(begun, None if vitals.accepted else judged)
            if anomaly is not None:
                self._recovery.treat(anomaly, judged.update, judged, is_scanned=scanned is not None)
            return False
        elif vitals.accepted:
            self._after_accepted(judged)
        elif not observes and (has_steps or judged.mark.tables or judged.mark.kept):
            # An overflow. Buffers may be NaN since its forward, and the next one has used them, or half an update.
            self._discard(begun)
            self._marks.undo(judged.mark, keeps_scale=True)
            return begun is None
        return True

    def _note_verdict(self, judged: Transaction, vitals: Vitals) -> None:
        """Take note of what the gate has decided on the device: only now the host knows."""
        if vitals.accepted:
            self.clock.step += 1
            self._updater.accept(self.clock.step)
            attempt, norm = judged.attempt, judged.attempt.clipped(vitals.grad_norm)
            self._scans.landed(self.clock.step, attempt.settings, norm, attempt.times)
        if judged.snapshot is not None and vitals.accepted:
            judged.snapshot.checks_state = self._parts.checks_state()
        elif judged.snapshot is not None:
            self._ring.drop(judged.snapshot)

    def _after_accepted(self, accepted: Transaction) -> None:
        step, recovery = self.clock.step, self._recovery
        recovery.update_accepted(was_limited=accepted.attempt.is_limited)
        self._on_accepted()
        for hook in self._hooks:
            hook.accepted(accepted)
        if accepted.snapshot is not None:
            accepted.snapshot.effects = self._controls.effects.state_dict()
        episode = self._checks.episode
        is_back = episode.is_at_reference(step) or (episode.is_only_reported and not recovery.observes)
        self._ring.verify(
            healthy_until=step, scanned_until=self._scans.clean_step, after=self._verify_after, is_back=is_back
        )
        self.samples.forget_before(self._ring.oldest_position(accepted.update.start))
        self._store.verified()

    def _discard(self, *newest_first: Transaction | None) -> None:
        """Give updates up: undo what they have changed, and go back to where they began."""
        given_up = [*filter(None, newest_first)]
        if given_up:  # what the newer ones changed is in the oldest mark, too
            self._marks.undo(given_up[-1].mark)
        for one in given_up:
            self.samples.go_back(one.update)
            one.ends("refused")
            if one is self._current:
                self._current = None
        self._updater.drop_gradients()
        self.seeds.between(self.samples.position)

    def _put_back_batch(self) -> None:
        """Undo an update whose loop was left: its batch comes again when the loop is entered again."""
        self._undo_loop()
        if self._current is not None and self._turn.is_complete:
            self._sent(self._current, self._updater.end_turn())
        elif self._current is not None:
            self._discard(self._current)

    def _undo_loop(self) -> None:
        """Undo what the loop did with what it keeps after an update that was refused."""
        if (refused := self._refused) is not None:
            self._refused = None
            self._marks.undo(refused)
            self._updater.drop_gradients()
            self.seeds.between(self.samples.position)

    @property
    def attempted_step(self) -> int:
        return self.clock.step + (self._pending is not None)

    def _on_accepted(self) -> None:
        """Called after each update that landed: it has to be cheap most of the time."""


HOW = "for losses that are stepped in turn, as in a GAN, call guard.update(loss, optimizer=...) for each optimizer"
NO_GRADIENT = (
    "no weight has a gradient: call loss.backward(), or accelerator.backward(loss), before, with a loss that was "
    "computed with the guarded model; weights that are frozen (requires_grad=False) have none"
)
TWICE = f"guard.{{verb}} was called twice for one batch: {HOW}"
MISSING = "a batch was not handed back: call guard.step(batch), or guard.update(loss)"
