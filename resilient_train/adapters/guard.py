"""The guard for a loop in plain Accelerate: takes what the loop has, and builds the engine around it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from resilient_train import guard, numerics
from resilient_train.adapters import arguments
from resilient_train.adapters.place import Place
from resilient_train.adapters.reporter import REPORT_EVERY, Report, RunReporter
from resilient_train.checkpoint.keeper import CheckpointKeeper
from resilient_train.checkpoint.resume import Resume
from resilient_train.checkpoint.writer import DiskConfig
from resilient_train.controls import Controls
from resilient_train.data.rows import Collate
from resilient_train.data.samples import Slicing
from resilient_train.diagnose.replay import Replay
from resilient_train.diagnose.search import Search
from resilient_train.drills import Drill
from resilient_train.errors import ConfigError, RanksDiffer, Stopped, TrainError
from resilient_train.record.incident_log import IncidentLog
from resilient_train.recover.knobs import KnobValues
from resilient_train.recovery import Recovery
from resilient_train.run_parts import RunParts
from resilient_train.state.copies import Backups
from resilient_train.state.ring import MemoryConfig, Ring
from resilient_train.state.run_state import Clock, RunState, Stateful
from resilient_train.types import Incident, Signal
from resilient_train.update.clip import ClipConfig, norm_over_ranks
from resilient_train.update.direct_steps import DirectStepCheck
from resilient_train.update.objective import Measured, Objective
from resilient_train.update.updater import Precision, Updater
from resilient_train.watch.checks import Checks
from resilient_train.watch.config import ChecksConfig
from resilient_train.watch.modes import AnomalyMode, EvaluationLoss
from resilient_train.watch.scans import Scans
from resilient_train.watch.vitals import UpdateHistory
from resilient_train.wording import log


@dataclass(frozen=True)
class Epoch:
    """An epoch, or what is left of it: iterate over it for its micro-batches."""

    number: int  # from 0 on
    batches: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class Guard(guard.EngineGuard):
    """Gate, checks, rewinds, remedies and journal around a training loop."""

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
        incidents: IncidentLog | None = None,
        resume: Resume | bool = False,
        stop: Callable[[], bool] = lambda: False,
        tracking: str | bool | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Take what a loop has: the model as Accelerate prepared it, the optimizer or several, a data set or a loader.

        `steps` is the planned total: a run is complete when so many updates are accepted, over all processes that
        worked on it. `objective` is `(model, batch) -> loss`. Without one the loop makes the loss, and hands it to
        `update`.
        `quarantine` is the quarantine.json of another run on the same data: its rows are left out. `data_changed`:
        refuse to resume where the data set changed, or accept it as it is. `disk` says after how many updates a
        verified state is written to the run directory, and with `resume` a run resumes from the newest one there.
        `stop` is asked before every update. `tracking` is the address of the MLflow that is to show the run, or True
        for the one that MLFLOW_TRACKING_URI names, else for a database next to the run directory.

        `incidents` is given where somebody else reports how the run ends; `beat` is called whenever something that
        takes long gets further.
        """
        world, clock = arguments.world(accelerator), Clock()
        is_own = incidents is None  # it is the loop of a user's own
        if is_own:
            arguments.log_to_stderr(world)
            numbers = {"clip": clip, "verify_after": verify_after, "seed": seed, "num_workers": num_workers}
            arguments.check(run_dir, **numbers, disk=disk, memory=memory, checks=checks)
            arguments.expect("drill", drill, Drill)
        measured, self.steps = arguments.objective(objective), arguments.steps(steps)
        batch_size = arguments.batch_size(batch_size, data, world)
        slicing = Slicing(batch_size, accelerator.gradient_accumulation_steps, world.rank, world.size)
        device, scaler = world.device, accelerator.scaler
        arguments.hold_on_to_memory(device)
        bare, called = arguments.bare(model, world), arguments.called(model, world)
        optimizers = arguments.optimizers(optimizer, bare)
        schedules = arguments.schedules(schedule, optimizers)
        samples, caution = arguments.samples(
            *(data, slicing),
            seed=seed,
            shuffle=shuffle,
            num_workers=num_workers,
            collate=collate,
            device=device,
        )
        more = {"recovery": recovery, "checks": checks, "clip": clip, "batch_size": batch_size, "seed": seed}
        self._given = arguments.given(optimizers, **more)
        checks, disk, policy = arguments.checks(checks), arguments.disk(disk), arguments.policy(recovery)
        backups, anomaly_mode = Backups(bare, scaler), AnomalyMode(accelerator.backward)
        state = RunState(bare, optimizers, schedules, samples, clock, device=device, scaler=scaler)
        gather = world.gather if world.size > 1 else None
        clipping = arguments.clipping(clip)
        updater = Updater(
            *(optimizers, schedules, clipping, gather), device=device, scaler=scaler, over_ranks=world.sum
        )

        def search(objective: Measured) -> Search:
            replay = Replay(
                called,
                lambda model, batch: objective.for_training(model, batch)[0],
                anomaly_mode.backward,
                backups,
                updater.drop_gradients,
                trained=updater.weights,
                scale=updater.loss_scale,
                over_ranks=lambda grads: norm_over_ranks(grads, world.sum),
                seed=seed,
                rank=world.rank,
                device=device,
            )
            return Search(replay, samples, world, beat)

        parts = RunParts(
            world=world,
            clock=clock,
            samples=samples,
            state=state,
            updater=updater,
            ring=Ring(state, memory or MemoryConfig(every=25, keep=4, max_gib=None), world.least),
            checks=Checks(checks),
            scans=Scans(checks, called, optimizers, arguments.own_weights(model) if world.size > 1 else None),
            precision=Precision(called, accelerator.mixed_precision),
            updates=UpdateHistory(),
            search=None if measured is None else search(measured),
            beat=beat,
        )
        place = Place(incidents) if incidents else arguments.place(run_dir, world, bool(resume), tracking)
        incidents = place.incident_log
        key, data_key = ("quarantine", "data_changed") if is_own else ("data.quarantine", "run.data_changed")
        try:
            differs = arguments.same_data(samples, incidents, world, data_changed, key=data_key)
            quarantined = arguments.quarantine(
                *(quarantine, samples, incidents.directory, world),
                key=key,
                data_may_differ=differs or data_changed == "accept",
            )
        except ConfigError:
            if place.lock is not None:
                place.lock.release()  # a notebook keeps the error, and with it the lock, when its cell is run again
            raise
        how = resume if isinstance(resume, Resume) else Resume()
        keeper = CheckpointKeeper(disk, parts, incidents.directory, incidents.run_history, how)
        controls = Controls(parts, policy, quarantined, keeper)
        treating = Recovery(parts, policy, incidents, controls, keeper, recovered_after=max(verify_after, 50))
        self.reporter = RunReporter(clock, incidents, parts.updates, place, keeper.progress)
        super().__init__(
            *(model, parts, treating),
            objective=measured,
            backups=backups,
            anomaly_mode=anomaly_mode,
            evaluation_loss=EvaluationLoss(checks.evaluation, called, backups, is_alone=world.size == 1),
            direct_steps=DirectStepCheck(optimizers),
            verify_after=verify_after,
            seed=seed,
            drill=drill,
            stop=stop,
        )
        self._owes_resume = bool(resume)
        self._left: Path | None = None  # where the state at the end of the loop is
        self._cautions = [caution] if caution else []
        waits = updater.gate.synchronous() if device.type != "cpu" else []
        self._cautions += arguments.cautions(samples, disk, memory, waits, has_objective=measured is not None)
        self._unused = arguments.warn_if_unused(self, world) if is_own else None

    # What a loop calls.

    @property
    def slicing(self) -> Slicing:
        """How the samples of an update are cut up."""
        return self.samples.slicing

    def keep(self, **items: Stateful) -> None:
        """Let more rewind along, such as an average of the weights: anything with state_dict and load_state_dict.

        What a loop does to it after an update that is refused a moment later stays done, until a rewind undoes it.
        """
        for name, item in items.items():
            arguments.keepable(name, item, has_begun=self._has_begun)
            self.state.keep(name, item)

    def remember(self, name: str, item: Stateful) -> None:
        """Let something that does not rewind be there again after a resume."""
        self._keeper.remember(name, item)

    def resume(self) -> bool:
        """Resume where the run directory's run ended, if one did: after `keep`. Otherwise `batches` does it."""
        self._owes_resume = False
        resumed = self._recovery.resume(is_explained=self._sizer.previous_ran_out())
        self._sizer.as_before(self._keeper.previous_samples_per_update)
        self._checks.rewind_check.resumed(self.clock.step)
        self._set_limits()
        self._seed_between(self.samples.position)
        return resumed

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Yield the epochs that are left of `count`, each of which yields its micro-batches; the first may be cut.

        An epoch is as many updates as it takes to see all the data once. Without `steps` this plans the total.
        """
        length = arguments.steps_per_epoch(self.samples, self.slicing)
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
        steps = arguments.steps(steps)
        self._start()
        if steps is None and self.steps is None:
            raise TrainError(_NO_TOTAL)
        last = math.inf if steps is None else self.attempted_step + steps
        yield from self._batches_until(int(min(last, self.steps or math.inf)))

    def _batches_until(self, last: int) -> Iterator[Any]:
        try:
            self._start()
            self._left = None
            planned = self.steps or last
            self.reporter.begin(planned, {"steps": planned, **self._given})
            if self.attempted_step >= last and not self.stopped:
                log.info("no batches: all %s steps of the plan are made", f"{planned:,}")
            yield from self.updates_until(last, plan=self.steps)
            if self.stopped:
                self.reporter.end("preempted", Stopped.exit_code)
            elif last == self.steps:
                self._recovery.finish()
                self._complete()
        finally:
            numerics.raise_eps(1.0)  # a knob of this run, and of the process: whatever ends the loop

    def _start(self) -> None:
        """Resume, if that is asked for, and verify the first state."""
        if not self._has_begun:
            for line in self._cautions:
                log.info("%s", line)
        if self._owes_resume and self.resume():
            log.info("resumed from step %d", self.clock.step)
        if not self._has_begun:
            self._keeper.check()
        self._has_begun = True
        if self._unused is not None:
            self._unused.detach()
        self._put_back_batch()
        self._seed_between(self.samples.position)
        if not self._ring.snapshots and self._in_flight is None:
            if self.clock.step == 0:
                found = self._examination.examine_now()  # what is compared with from now on
                if found is not None and found.signal is Signal.RANK_MISMATCH:
                    raise RanksDiffer(f"{found.evidence}, before the first update: {_FROM_THE_START}")
            if self._keeper.is_verified or self._ring.is_due(self.clock.step):  # else it would not be in memory either
                self._controls.snapshot(self.clock.step, verified=self._keeper.is_verified)
            if self._checks.rewind_check.is_open:  # since before the process ended
                self._ring.keep_reference(self.clock.step)

    def _complete(self) -> None:
        """Write the end state of a loop of a user's own. Every rank comes here: weights may be spread."""
        if self.reporter.place.directory is None:
            return
        # What follows may be an evaluation, or more steps: the last words are said by `leave`, `close`, or at the exit.
        self._left = self._finish_saving(healthy=True)
        digests = (self.state.weights_sha256(), self.state.sha256())
        self.reporter.end("completed", digests=digests)

    def leave(self) -> Path | None:
        """Write the state as it is, when `batches` has ended: the run can be resumed from there."""
        if self._left is None:
            self._left = self._finish_saving(healthy=not self.stopped)
        self.reporter.left_state(self._left)
        return self._left

    def _finish_saving(self, *, healthy: bool) -> Path | None:
        left = self._keeper.finish(self._controls.state_dict(), healthy=healthy)
        self._recovery.note_saves()
        if healthy:
            self._recovery.close_saving_incident()
        self._recovery.process_ends()
        return left

    def close(self) -> None:
        """End a run before its last step: hear the last verdict, close what has healed, let go of worker processes."""
        self._put_back_batch()
        error, gave_up = sys.exc_info()[1], None
        if self.settle() and self._examine_now() is None:
            if error is None and self._recovery.is_unrecovered():
                gave_up = self._recovery.end_unrecovered()
            else:
                self._recovery.finish()
                if error is None and self.steps is None and not self.stopped and self._left is None:
                    self._complete()
                self._recovery.close_saving_incident()
        self._recovery.process_ends()
        self.reporter.closed(gave_up or error, self.steps)
        self.let_go()
        if gave_up is not None:
            raise gave_up

    def let_go(self) -> None:
        """Give back what is the process's: worker processes, patched code, the epsilon of safe operations."""
        self._controls.unpatch()
        self._direct_steps.end()
        numerics.raise_eps(1.0)
        self.samples.close()
        self._keeper.let_go()
        self._recovery.note_saves()

    # What a loop may ask.

    @property
    def knobs(self) -> KnobValues:
        """What remedies have turned, and the next update is made with."""
        return self._controls.knobs.values

    @property
    def incidents(self) -> list[Incident]:
        """All incidents so far."""
        return self._recovery.incident_log.incidents

    def tally(self) -> dict[str, Any]:
        """Count incidents for a summary."""
        return self._recovery.incident_log.tally()

    @property
    def recent_loss(self) -> float | None:
        """The median of the last 50 accepted losses, those of earlier processes included."""
        return self._parts.updates.recent_loss

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation: once they are verified, the weights with the least loss are kept in `best`."""
        self._keeper.evaluated(metrics)
        self.reporter.note_evaluation(metrics)

    def report(self) -> Report | None:
        """Put together what is known of the newest update whose verdict is known; None if that was reported already.

        Waits for the device, and for the other ranks: all of them come here.
        """
        knobs = {name: getattr(self.knobs, name) for name in ("lr", "clip", "eps")}
        return self.reporter.report(self.newest, self.metrics.read, self.slicing.samples, knobs)

    def on_device(self, batch: Any) -> Any:
        """Move a batch of any shape to where the model is."""
        return self.world.on_device(batch)

    @property
    def saving_since(self) -> float | None:
        """Since when a checkpoint is being written, on the monotonic clock."""
        return self._keeper.saving_since

    def ended(self, *, was_killed: bool = False) -> None:
        """Note that the process ends in order; `was_killed`: as another process of the run did not."""
        self._recovery.process_ends(was_killed=was_killed)

    def leave_newest(self) -> tuple[int, Path | None]:
        """From another thread, as the loop is not waited for: leave the newest verified state on disk.

        Returns the step that the run resumes from, and where its state is; None where that is not the newest verified.
        """
        return self._recovery.leave_newest()

    def hung(self, evidence: str, *, in_update: bool) -> None:
        """From another thread, while the loop hangs: write that down, and the newest verified state if possible."""
        began = self._newest_begun.began if self._newest_begun else None
        self._recovery.hung(evidence, in_update=in_update, began=began)

    # What the engine says.

    def _on_accepted(self) -> None:
        """Show the loop in MLflow, now and then."""
        place = self.reporter.place
        if place.directory is not None and self.clock.step % REPORT_EVERY == 0:
            self.reporter.show(self.report() if place.tracking is not None else None)

    def _on_failure(self, error: TrainError) -> None:
        """Write down the error that ends the run."""
        self.reporter.fail(error)


_NO_TOTAL = (
    "guard.batches() yields the rest of a planned total: give one with Guard(steps=...), or ask for n more with "
    "guard.batches(n)"
)
_FROM_THE_START = (
    "make or load the model alike on every rank before it is prepared, and change no weights after that; "
    "if they are to differ, say checks.replicas.every=0"
)
