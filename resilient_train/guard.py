"""The conductor: puts the rooms around a model, its optimizer and its data.

k+1: take samples -> forward and backward of each micro-batch
     -> hear the verdict on k, measured an update ago: an anomaly stops here, before k+1 lands
     -> gate k+1 on the device -> step -> what it measured is on its way
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from resilient_train import adapters, numerics
from resilient_train.adapters.memory import is_out_of_memory
from resilient_train.adapters.memory import told as memory_told
from resilient_train.adapters.reporter import REPORT_EVERY, Report, RunReporter
from resilient_train.checkpoint.writer import DiskConfig
from resilient_train.data.rows import Collate, sampled
from resilient_train.data.samples import Slicing, Update
from resilient_train.diagnose.replay import Replay
from resilient_train.diagnose.search import Refused, Search
from resilient_train.drills import Drill, Place
from resilient_train.durable import Durable
from resilient_train.errors import ConfigError, RanksDiffer, Stopped, StorageFailed, TrainError
from resilient_train.examination import Examination
from resilient_train.objective import Measured, Metrics, Objective
from resilient_train.portions import Portions
from resilient_train.record.incidents import IncidentBook
from resilient_train.record.progress import Doing
from resilient_train.recover.knobs import KnobValues
from resilient_train.recovery import Treatment
from resilient_train.resumption import Resume
from resilient_train.state.copies import Backup, Backups
from resilient_train.state.randomness import Purpose, mix, seed_all
from resilient_train.state.ring import Held, MemoryConfig, Ring
from resilient_train.state.run_state import Clock, RunState, Stateful
from resilient_train.types import Anomaly, Incident, Signal, Vitals
from resilient_train.update.agreement import DIGEST, Flag
from resilient_train.update.clip import ClipConfig, norm_over_ranks
from resilient_train.update.updater import Attempt, Precision, Updater
from resilient_train.ward import Ward
from resilient_train.watch.anomaly_mode import AnomalyMode
from resilient_train.watch.checks import Checks
from resilient_train.watch.config import ChecksConfig
from resilient_train.watch.scans import Scans
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
    """An update that went to the gate and was not heard of yet."""

    begun: _Begun
    attempt: Attempt
    loss: torch.Tensor  # of this rank
    limits: tuple[float, float]
    sent: Sent
    metrics: Metrics
    held: Held | None = None  # the snapshot of the state after it, if one was taken


@dataclass(frozen=True)
class Epoch:
    """An epoch, or what is left of it: iterate over it for its micro-batches."""

    number: int  # from 0 on
    batches: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class Guard:
    """Gate, checks, rewinds, remedies and journal around a training loop."""

    _newest: ClassVar[int] = 0  # which update was begun last, by any guard of this process

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        data: Any,
        batch_size: int | None = None,
        steps: int | None = None,
        schedule: Any = None,
        objective: Objective | None = None,
        recovery: Any = "balanced",
        checks: ChecksConfig | str = "default",
        run_dir: str | Path | None = None,
        clip: ClipConfig | float | None = None,
        memory: MemoryConfig | None = None,
        verify_after: int = 20,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate: Collate | None = None,
        quarantine: str | Path | None = None,
        data_changed: str = "refuse",
        disk: DiskConfig | int | None = None,
        drill: Drill | None = None,
        book: IncidentBook | None = None,
        resume: Resume | bool = False,
        stop: Callable[[], bool] = lambda: False,
        tracking: str | bool | None = None,
    ) -> None:
        """Take what a loop has: the model as Accelerate prepared it, the optimizer or several, a data set or a loader.

        `steps` is the planned total: a run is complete when so many updates are accepted, over all processes that
        worked on it. `objective` is `(model, batch) -> loss`. Without one the loop makes the loss, and hands it to
        `update`.
        `quarantine` is the quarantine.json of another run on the same data: its rows are left out. `data_changed`:
        refuse to resume where the data set changed, or accept it as it is. `disk` says
        after how many updates a proven state is written to the run directory, and with `resume` a run goes on from
        the newest one there. `stop` is asked before every update. `tracking` is the address of the MLflow that is to
        show the run, or True for the one that MLFLOW_TRACKING_URI names, else for a database beside the run directory.
        """
        self.world = adapters.world(accelerator)
        self.model, self.clock, self.seed, self.drill = model, Clock(), seed, drill
        is_own = book is None  # it is the loop of a user's own
        if is_own:
            adapters.speak_up(self.world)
            numbers = {"clip": clip, "verify_after": verify_after, "seed": seed, "num_workers": num_workers}
            adapters.check(run_dir, **numbers, disk=disk, memory=memory, checks=checks)
            adapters.expect("drill", drill, Drill)
        self.objective, self.steps = adapters.objective(objective), adapters.steps(steps)
        batch_size = adapters.batch_size(batch_size, data, self.world)
        slicing = Slicing(batch_size, accelerator.gradient_accumulation_steps, self.world.rank, self.world.size)
        device, scaler = self.world.device, accelerator.scaler
        adapters.hold_on_to_memory(device)
        bare, called = adapters.bare(model, self.world), adapters.called(model, self.world)
        optimizers = adapters.optimizers(optimizer, bare)
        schedules = adapters.schedules(schedule, optimizers)
        self.samples, caution = adapters.samples(
            data,
            slicing,
            seed=seed,
            shuffle=shuffle,
            num_workers=num_workers,
            collate=collate,
            device=device,
        )
        more = {"recovery": recovery, "checks": checks, "clip": clip, "batch_size": batch_size, "seed": seed}
        self._given = adapters.given(optimizers, **more)
        clipping, checks = adapters.clipping(clip), adapters.checks(checks)
        gather = self.world.gather if self.world.size > 1 else None
        self.state = RunState(bare, optimizers, schedules, self.samples, self.clock, device=device, scaler=scaler)
        self._updater = Updater(
            *(optimizers, schedules, clipping, gather), device=device, scaler=scaler, over_ranks=self.world.sum
        )
        self._backups = Backups(bare, scaler)
        self._ring = Ring(self.state, memory or MemoryConfig(every=25, keep=4, max_gib=None), self.world.least)
        self._verify_after = verify_after
        self._panel = Checks(checks)
        self._scans = Scans(checks, called, optimizers, adapters.own_weights(model) if self.world.size > 1 else None)
        self._anomaly_mode = AnomalyMode(accelerator.backward)
        self._examination = Examination(self.world, self.clock, self._scans, self._backups)
        self._precision = Precision(called, accelerator.mixed_precision)
        ward = Ward(
            world=self.world,
            clock=self.clock,
            samples=self.samples,
            slicing=slicing,
            state=self.state,
            updater=self._updater,
            ring=self._ring,
            panel=self._panel,
            scans=self._scans,
            precision=self._precision,
            search=None if self.objective is None else self._search(called, self.objective),
            beat=lambda: self.beat(),
        )
        key, data_key = ("data.quarantine", "run.data_changed") if book else ("quarantine", "data_changed")
        place = adapters.Place(book) if book else adapters.place(run_dir, self.world, bool(resume), tracking)
        book = place.book
        try:
            differs = adapters.same_data(self.samples, book, self.world, data_changed, key=data_key)
            listed = adapters.quarantine(
                *(quarantine, self.samples, book.directory, self.world),
                key=key,
                data_may_differ=differs or data_changed == "accept",
            )
        except ConfigError:
            if place.lock is not None:
                place.lock.release()  # a notebook keeps the error, and with it the lock, when its cell is run again
            raise
        self._treatment = Treatment(
            *(ward, adapters.policy(recovery), book, listed),
            recovered_after=max(verify_after, 50),
        )
        self._left: Path | None = None  # where the state at the end of the loop is
        how = resume if isinstance(resume, Resume) else Resume()
        self._durable = Durable(adapters.disk(disk), ward, self._treatment, how)
        self.reporter = RunReporter(
            self.clock, self._treatment.history, self._treatment.passed, place, self._durable.progress
        )
        self._treatment.ends_with = self.reporter.fail
        self._portions = Portions(self._treatment)
        self._is_spread = self.state.is_sharded
        self._owes_resume = bool(resume)
        self._treatment.on_disk = self._durable
        self._examination.convict = self._treatment.convict
        self._stop, self.stopped = stop, False  # before its last update, because somebody asked
        self._cautions = [caution] if caution else []
        if 0 < self.samples.rows < slicing.samples:
            many = f"an update takes {slicing.samples:,} rows, and the data set has {self.samples.rows:,}"
            self._cautions.append(f"data: {many}: each update takes rows more than once")
        if adapters.disk(disk).every and memory is not None and not memory.every:
            self._cautions.append(
                "checkpoints come from snapshots in memory, and there are none: one is left at the end"
            )
        if device.type != "cpu" and (waits := self._updater.gate.synchronous()):
            why = "not fused, so each step waits for the device; use fused=True where it is to be had"
            self._cautions.append(f"{' and '.join(waits)}: {why}")
        if self.objective is None:
            self._cautions.append(
                "guard.update cannot replay a step, so diagnosis is limited; pass objective= for the full one"
            )
        self.metrics = MetricsLog(self.world, device)
        self.beat: Callable[[], None] = lambda: None  # called whenever a diagnosis has got on
        self.newest: Vitals | None = None  # the newest update that was heard of
        self._turn = adapters.Turn(optimizers)
        self._unused = adapters.warn_if_unused(self, self.world) if is_own else None
        self._has_begun = False
        self._begun: _Begun | None = None
        self._newest_begun: _Begun | None = None
        self._handed: Any = None  # the batch that the loop has got
        self._described = self._is_checked = False
        self._repeats = 0  # of one update that was refused by mistake
        self._losses: list[torch.Tensor] = []
        self._reported: list[Metrics] = []
        self._in_flight: _InFlight | None = None

    # What a loop calls.

    @property
    def slicing(self) -> Slicing:
        """How the samples of an update are dealt out."""
        return self._treatment.ward.slicing

    def keep(self, **items: Stateful) -> None:
        """Let more rewind along, such as an average of the weights: anything with state_dict and load_state_dict.

        What a loop does to it after an update that is refused a moment later stays done, until a rewind undoes it.
        """
        for name, item in items.items():
            adapters.keepable(name, item, has_begun=self._has_begun)
            self.state.keep(name, item)

    def resume(self) -> bool:
        """Go on where the run directory's run ended, if one did: after `keep`. `batches` does it, if nobody has."""
        self._owes_resume = False
        resumed = self._durable.resume(is_explained=self._portions.look())
        self._portions.as_before(self._durable.samples)
        self._panel.rewind_check.resumed(self.clock.step)
        self._set_limits()
        self._seed_between(self.samples.position)
        return resumed

    def remember(self, name: str, item: Stateful) -> None:
        """Let something that does not rewind be there again after a resume."""
        self._durable.remember(name, item)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation: once they are proven, the weights with the least loss are kept in `best`."""
        self._durable.evaluated(metrics)
        self.reporter.note_evaluation(metrics)

    def leave(self) -> Path | None:
        """Write the state as it is, when `batches` has ended: `resume` goes on from there."""
        if self._left is None:
            self._left = self._durable.finish(healthy=not self.stopped)
            self.ended()
        self.reporter.left_state(self._left)
        return self._left

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Yield the epochs that are left of `count`, each of which yields its micro-batches; the first may be cut.

        An epoch is as many updates as it takes to see all the data once. Without `steps` this plans the total.
        """
        length = adapters.steps_per_epoch(self.samples, self.slicing)
        self._start()
        self.steps = self.steps or count * length
        numbers = range(self.attempted_step // length, min(count, -(-self.steps // length)))
        if not numbers:
            yield from self.batches()  # says why there are none
        for number in numbers:
            if not self.stopped:
                yield Epoch(number, partial(self._batches_until, min((number + 1) * length, self.steps)))

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """Yield micro-batches, on the device, until `steps` more updates are accepted; else the rest of the plan.

        The last of them is sound then. It ends sooner once the loop is `stopped`.
        """
        steps = adapters.steps(steps)
        self._start()
        if steps is None and self.steps is None:
            raise TrainError(_NO_TOTAL)
        last = math.inf if steps is None else self.attempted_step + steps
        yield from self._batches_until(int(min(last, self.steps or math.inf)))

    def _batches_until(self, last: int) -> Iterator[Any]:
        try:
            yield from self._updates_until(last)
        finally:
            numerics.raise_eps(1.0)  # a knob of this run, and of the process: whatever ends the loop

    def _updates_until(self, last: int) -> Iterator[Any]:
        self._start()
        self._left = None
        planned = self.steps or last
        self.reporter.begin(planned, {"steps": planned, **self._given})
        if self.attempted_step >= last and not self.stopped:
            log.info("no batches: all %s steps of the plan are made", f"{planned:,}")
        while self._goes_on(last):
            if self.drill is not None and self.drill.strikes_at(self.clock.tick + 1) and not self.settle():
                continue  # the fault strikes once, so not in an update that is dropped for the sake of the last one
            self._snapshot()
            start = self.samples.next_start  # known before they are fetched: that may take for ever
            self._durable.progress.updating(self.clock.tick + 1, self.clock.step, start, start + self.slicing.samples)
            try:
                update = self.samples.next_update(self.beat)
            except StorageFailed as error:
                if (held := self._ring.newest_proven()) is not None:
                    self._durable.leave_alone(held)  # another rank may have its data
                self.ended()
                self.reporter.fail(error)
                raise
            self._begin(update)
            for number, batch in enumerate(update.batches, start=1):
                yield from self._fed(batch, is_last=number == len(update.batches))
                if self._begun is None:
                    break  # dropped, or made to the end
                if len(self._losses) < number:
                    raise TrainError("a batch was not handed back: call guard.step(batch), or guard.update(loss)")
        if self.stopped:
            self.reporter.end("preempted", Stopped.exit_code)
        elif last == self.steps:
            self._treatment.finish()
            self._complete()

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
            evidence = memory_told(error, self.world.device)
        else:
            self._reported.append(metrics)
            return self.update(loss)
        self._slim(begun, evidence)  # here, where the error no longer holds on to what it was raised among
        return False

    def update(self, loss: torch.Tensor) -> bool:
        """Take over after the loop's own forward and backward of a batch."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
            raise TypeError(f"guard.update takes the loss as a scalar tensor, not one of {what}")
        self._require_batch("update")
        assert self._begun is not None
        # Rows that could not be fetched: every rank has to hear of it, and this is the way that all trouble takes.
        loss = torch.full_like(loss, math.nan) if self._begun.update.failed else loss.detach()
        self._losses.append(loss if loss.dtype is torch.float32 and loss.dim() == 0 else loss.float().reshape(()))
        if len(self._losses) < self.slicing.accumulation:
            return False
        if all(weight.grad is None for weight in self._updater.weights):
            raise TrainError("no weight has a gradient: call accelerator.backward(loss) before guard.update(loss)")
        with self._turn.of_guard():
            return self._conclude()

    def settle(self) -> bool:
        """Hear the verdict on the last update now. False: it was an anomaly, and has been treated."""
        if self._begun is not None:
            raise TrainError("guard.settle belongs between two updates: hand the batch over first")
        self._seed_between(self.samples.position)
        self._durable.progress.turned_to(Doing.BETWEEN)
        return self._hear()

    def close(self) -> None:
        """End a run before its last step: hear the last verdict, close what has healed, let go of worker processes."""
        self._put_back_batch()
        error, gave_up = sys.exc_info()[1], None
        if self.settle() and self._examination.now() is None:
            if error is None and self._treatment.has_to_return():
                gave_up = self._treatment.return_unrecovered()
            else:
                self._treatment.finish()
                if error is None and self.steps is None and not self.stopped and self._left is None:
                    self._complete()
                self._durable.end_failing()
        self.ended()
        self.reporter.closed(gave_up or error, self.steps)
        self.let_go()
        if gave_up is not None:
            raise gave_up

    def let_go(self) -> None:
        """Give back what is the process's: worker processes, the code that wears armor, the knob of safe operations."""
        self._treatment.disarm()
        self._turn.end()
        numerics.raise_eps(1.0)
        self.samples.close()
        self._durable.let_go()

    @property
    def knobs(self) -> KnobValues:
        """What remedies have turned, and the next update is made with."""
        return self._treatment.knobs.values

    @property
    def incidents(self) -> list[Incident]:
        """All incidents so far."""
        return self._treatment.history.incidents

    def tally(self) -> dict[str, Any]:
        """Count incidents for a summary."""
        return self._treatment.history.tally()

    @property
    def recent_loss(self) -> float | None:
        """The median of the last 50 accepted losses, those of earlier processes included."""
        return self._treatment.passed.recent_loss

    def report(self) -> Report | None:
        """Put together what is known of the newest update that was heard of; None if that was told already.

        Waits for the device, and for the other ranks: all of them come here.
        """
        knobs = {name: getattr(self.knobs, name) for name in ("lr", "clip", "eps")}
        return self.reporter.report(self.newest, self.metrics.read, self.slicing.samples, knobs)

    @property
    def saving_since(self) -> float | None:
        """Since when a checkpoint is being written, on the monotonic clock."""
        return self._durable.saving_since

    def ended(self, *, was_killed: bool = False) -> None:
        """Note that the process ends in order, be it with an error: no samples are to blame for it.

        `was_killed`: another process of the run was, and the record stays as if it had been this one.
        """
        self._treatment.surroundings.close()
        if not was_killed:
            self._durable.progress.turned_to(Doing.ENDED, self.clock.tick)

    def leave_newest(self) -> tuple[int, Path | None]:
        """From another thread, as the loop is not waited for: leave the newest proven state on disk.

        Returns the step that the run goes on from, and where its state is; None where that is not the newest proven.
        """
        return self._durable.leave_newest()

    def hung(self, evidence: str, *, in_update: bool) -> None:
        """From another thread, while nothing goes on: write that down, and the newest proven state if there is time."""
        self._durable.hung(evidence, in_update=in_update)

    @property
    def attempted_step(self) -> int:
        """Accepted updates, the one that was not heard of yet included."""
        return self.clock.step + (self._in_flight is not None)

    def on_device(self, batch: Any) -> Any:
        """Move a batch of any shape to where the model is."""
        return batch if self.world.device.type == "cpu" else send_to_device(batch, self.world.device, non_blocking=True)

    def _search(self, model: nn.Module, objective: Measured) -> Search:
        """What finds culprits, by making a step once more."""
        replay = Replay(
            model,
            lambda model, batch: objective.for_training(model, batch)[0],
            self._anomaly_mode.backward,
            self._backups,
            self._updater.drop_gradients,
            trained=self._updater.weights,
            scale=self._updater.loss_scale,
            over_ranks=lambda grads: norm_over_ranks(grads, self.world.sum),
            seed=self.seed,
            rank=self.world.rank,
            device=self.world.device,
        )
        return Search(replay, self.samples, self.world, self.on_device, lambda: self.beat())

    # One update, from its samples to the gate.

    def _start(self) -> None:
        """Say what the run is protected by, and prove its first state."""
        if not self._has_begun:
            for line in self._cautions:
                log.info("%s", line)
        if self._owes_resume and self.resume():
            log.info("goes on from step %d", self.clock.step)
        if not self._has_begun:
            self._durable.check()
        self._has_begun = True
        if self._unused is not None:
            self._unused.detach()
        self._put_back_batch()
        self._seed_between(self.samples.position)
        if not self._ring.held and self._in_flight is None:
            if self.clock.step == 0:
                found = self._examination.now()  # what is compared with from now on
                if found is not None and found.signal is Signal.RANK_MISMATCH:
                    raise RanksDiffer(f"{found.evidence}, before the first update: {_FROM_THE_START}")
            self._durable.take(verified=self._durable.is_proven)
            if self._panel.rewind_check.is_open:  # since before the process ended
                self._ring.pin(self.clock.step)

    def _complete(self) -> None:
        """Write the end state of a loop of somebody's own. Every rank comes here: weights may be spread."""
        if self.reporter.place.directory is None:
            return
        # What follows may be an evaluation, or more steps: the last words are said by `leave`, `close`, or at the exit.
        self._left = self._durable.finish(healthy=True)
        self.ended()
        self.reporter.end("completed", digests=(self.state.weights_sha256(), self.state.sha256()))

    def _goes_on(self, steps: int) -> bool:
        """Say whether another update is wanted up to a step; there the last one is heard and scanned first.

        Whether what happened is overcome is asked only at the end of the plan: before it, there is time.
        """
        if self._stop():
            self._updater.ask_to_stop()
            if self.world.size == 1:
                self.settle()
                self.stopped = True
        if self.stopped:
            return False
        if self.attempted_step < steps:
            return True
        if not (self.settle() and self.clock.step >= steps):
            return self.clock.step < steps
        anomaly = self._examination.now()
        if anomaly is None and self.newest is not None and steps == self.steps:
            anomaly = self._panel.unsettled(self.newest)
            if anomaly is None and self._treatment.has_to_return():
                anomaly = self._panel.not_recovered(self.newest)
        if anomaly is not None:
            place = self.samples.position
            update = self._newest_begun.update if self._newest_begun else Update(place, place, [])
            self._treatment.treat(anomaly, update, began=self._treatment.update_began)
            self._set_limits()
        return self.clock.step < steps

    def _put_back_batch(self) -> None:
        """Undo what was begun when a loop is left with a batch in hand: it comes again if the loop is entered again."""
        if self._begun is not None:
            self._updater.drop_gradients()
            self._backups.put_back(self._begun.backup)
            self.samples.go_back(self._begun.update)
            self._begun = None

    def _snapshot(self) -> None:
        """Keep the state between two updates, now that the loop has done what it does after one, such as averaging."""
        self._updater.require_groups()  # before anything rewinds or is copied without a new one
        step = self.attempted_step
        if self._ring.is_due(step) and (held := self._ring.take(step)) is not None:
            if self._in_flight is not None:
                self._in_flight.held = held
            else:
                held.statistics, held.remedies = self._statistics(), self._treatment.remedies()

    def _slim(self, begun: _Begun, evidence: str) -> None:
        """Make the update again in smaller micro-batches, as it did not fit into memory."""
        slimmer = self._portions.slimmer(begun.step, evidence)
        self._begun = None
        self._drop(begun)
        self._portions.slim(slimmer, begun.step, evidence)

    def _require_batch(self, verb: str) -> _Begun:
        """Return the update whose batch the loop is handing back; raise where there is none."""
        if not self._has_begun:
            raise TrainError(f"guard.{verb} before the loop: iterate over guard.batches(), which makes the batches")
        if self._begun is None or len(self._losses) >= len(self._begun.fed):
            raise TrainError(_TWICE.format(verb=verb))
        if Guard._newest != id(self._begun):
            raise TrainError(_TWO_GUARDS)
        return self._begun

    def _begin(self, update: Update) -> None:
        self._losses.clear()
        self._reported.clear()
        knobs = self._treatment.knobs.values
        self._precision.set(higher=knobs.higher_precision)
        numerics.raise_eps(knobs.eps)
        begun = _Begun(update, self.clock.tick + 1, self.attempted_step + 1, self._backups.take(), [], time.monotonic())
        self._begun = self._newest_begun = begun
        self._treatment.update_began = begun.began
        Guard._newest = id(begun)
        self._durable.progress.updating(begun.tick, self.clock.step, update.start, update.stop)
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
        self._handed = batch = self.on_device(batch)
        # Where weights are spread they go to their owners at once: to wait, each rank would have to hold all of them.
        stays_here = self.world.size > 1 and not is_last and not self._is_spread
        waits = self.world.accelerator.no_sync(self.model) if stays_here else nullcontext()
        with waits, self._turn.of_loop(), self._anomaly_mode.unchecked():
            yield batch

    def _place(self) -> Place:
        begun = self._newest_begun
        assert begun is not None
        return Place(begun.tick, begun.step, begun.update.start, len(self._losses), self.world.rank)

    def _conclude(self) -> bool:
        """The fixed point between backward and optimizer: hear of the last update, then send this one to the gate."""
        begun, self._begun = self._begun, None
        assert begun is not None
        if not self._hear(begun):
            return False
        if self.stopped:
            self._drop(begun)
            return False
        if self.drill is not None:
            self.drill.on_gradients(self._place(), self._updater.weights)
        self._examination.launch(begun.backup)
        loss = self._losses[0] if len(self._losses) == 1 else mean(self._losses)
        rate = 1.0 if self.drill is None else self.drill.rate_factor(self._place())
        self._ring.before_change()
        self._updater.agreement.set_flag(Flag.BUSY, self._durable.is_busy)
        digest = 0 if self._updater.agreement.is_alone else self._treatment.digest(begun.update.start)
        attempt = self._updater.apply(self.clock.step, loss, self._treatment.knobs.values, rate=rate, digest=digest)
        self._declare_restart(attempt)
        self.clock.tick += 1
        sent, metrics = Sent(attempt.measured, attempt.numbers), mean_metrics(self._reported)
        self._in_flight = _InFlight(begun, attempt, loss, self._updater.gate.limits, sent, metrics)
        return True

    def _seed_between(self, position: int) -> None:
        """At rest random numbers are a function of the place, too: an update that was undone leaves no trace."""
        seed_all(mix(Purpose.BETWEEN, self.seed, position, self.world.rank), self.world.device)

    # One verdict, an update later.

    def _hear(self, begun: _Begun | None = None) -> bool:
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
            digests = [row[DIGEST] for row in flight.attempt.rows_by_rank()]
            self._treatment.ranks_differ(digests, began=flight.begun.began)
        self.newest = vitals
        self.stopped |= vitals.stop_asked
        self.metrics.note(flight.metrics)
        finding = self._panel.judge(vitals)
        for remark in (*finding.remarks, *self._scans.remarks()):
            log.info("note: %s", remark)
        self._set_limits()
        self._treatment.heard(vitals)
        if vitals.accepted:
            self._accept(flight, vitals)
        elif flight.held is not None:
            self._ring.drop(flight.held)
        scanned = self._examination.hear()
        anomaly = scanned or finding.anomaly or self._repeated_in_vain(finding.repeat, vitals)
        anomaly = anomaly or self._treatment.explainer.foresee(vitals, flight.begun.fed)
        if anomaly is None and not finding.repeat:
            self._healthy(flight, vitals)
            return True
        self._undo(flight, begun, vitals)
        if anomaly is not None:
            update, fed = flight.begun.update, flight.begun.fed
            spiked = not float(flight.loss) <= flight.limits[0]
            named = scanned or self._examination.named(anomaly, fed, update.failed, spiked=spiked)
            is_spent = flight.begun.versions != [versions(batch) for batch in fed]
            usual = self._examination.nan_is_usual
            refused = None if vitals.accepted else Refused(update, fed, flight.limits, is_spent, usual)
            self._treatment.treat(named, update, refused, began=flight.begun.began)
            self._set_limits()
        return False

    def _repeated_in_vain(self, repeat: bool, vitals: Vitals) -> Anomaly | None:
        """A limit that gave way, and an update that it refuses all the same: repeating has to end somewhere."""
        self._repeats = self._repeats + 1 if repeat else 0
        if self._repeats <= _MOST_REPEATS or vitals.refused is None:
            return None
        evidence = f"loss {vitals.loss:.4g}, gradient norm {vitals.grad_norm:.4g}: refused {self._repeats} times"
        return Anomaly(vitals.refused, vitals.step + 1, vitals.tick, vitals.step, evidence, landed=False)

    def _set_limits(self) -> None:
        """Hand what the checks allow to the gate."""
        self._updater.gate.limit(*self._panel.limits)

    def _accept(self, flight: _InFlight, vitals: Vitals) -> None:
        self.clock.step += 1
        self._updater.accept(self.clock.step)
        limit = flight.attempt.max_norm
        self._scans.landed(self.clock.step, flight.attempt.settings, self._updater.clipped(vitals.grad_norm, limit))
        if flight.held is not None:
            flight.held.statistics = self._statistics()

    def _healthy(self, flight: _InFlight, vitals: Vitals) -> None:
        self._backups.let_go(flight.begun.backup)
        if vitals.accepted:
            self._treatment.healthy(was_limited=flight.attempt.is_limited)
            place = self.reporter.place
            if place.directory is not None and self.clock.step % REPORT_EVERY == 0:
                self.reporter.show(self.report() if place.tracking is not None else None)
            if not self._is_checked:  # optimizers make their state in their first step
                self._durable.check()
                self._is_checked = True
            if flight.held is not None:
                flight.held.remedies = self._treatment.remedies()
            scanned, after = self._scans.clean_step, self._verify_after
            is_back = self._panel.is_only_reported or self._panel.rewind_check.allows_proof(self.clock.step)
            self._ring.verify(healthy_until=self.clock.step, scanned_until=scanned, after=after, is_back=is_back)
            self._durable.verified(any_busy=vitals.any_busy)
        book = self._treatment.book
        if vitals.accepted and book.directory is not None and book.data is None and flight.begun.update.keys:
            rows = [key.row for keys in flight.begun.update.keys for key in keys]
            book.knows_data(sampled(self.samples.dataset, rows))  # type: ignore[attr-defined]
        if vitals.accepted and self.clock.step == 1 and not self._described:
            self._described = True
            if self.objective is None:
                adapters.warn_of_scalers(self._updater.scaler)
            log.info("%s", self._ring.describe())  # its size is known now that the optimizer has its moments
            self._examination.note_first(flight.begun.fed)

    def _declare_restart(self, attempt: Attempt) -> None:
        """A schedule that starts again makes the loss jump on purpose."""
        if attempt.restarts:
            self._panel.expect(self.clock.step + 1)

    def _undo(self, flight: _InFlight, begun: _Begun | None, vitals: Vitals) -> None:
        """Take back what does not count: gradients, what forwards did to buffers, and the place in the data."""
        self._updater.drop_gradients()
        if not vitals.accepted:
            self._updater.undo(flight.attempt)
        first = flight.begun if not vitals.accepted else begun
        if first is not None:
            self._drop(first)

    def _drop(self, begun: _Begun) -> None:
        """Take back an update that is not to land."""
        self._updater.drop_gradients()
        self._seed_between(begun.update.start)
        self._backups.put_back(begun.backup)
        self.samples.go_back(begun.update)

    def _statistics(self) -> dict[str, Any]:
        return {"panel": self._panel.state_dict(), "scans": self._scans.state_dict()}


_MOST_REPEATS = 2
_NO_TOTAL = (
    "guard.batches() yields the rest of a planned total: give one with Guard(steps=...), or ask for n more with "
    "guard.batches(n)"
)
_IN_TURN = (
    "losses that are stepped in turn, as in a GAN, are not supported; "
    "add them up and give one guard all optimizers, which then step together"
)
_TWICE = f"guard.{{verb}} was called twice for one batch: {_IN_TURN}"
_TWO_GUARDS = f"two guards are at work in turn: {_IN_TURN}"
_FROM_THE_START = (
    "make or load the model alike on every rank before it is prepared, and change no weights after that; "
    "if they are to differ, say checks.replicas.every=0"
)
