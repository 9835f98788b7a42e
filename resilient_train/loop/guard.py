"""The guard for a loop with Accelerate: converts what the loop has, and builds the engine around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn

from resilient_train.core.clip import Clipper
from resilient_train.core.controls import Controls
from resilient_train.core.copies import Stateful
from resilient_train.core.knobs import Knobs
from resilient_train.core.mark import Marks
from resilient_train.core.randomness import Seeds
from resilient_train.core.recovery import Recovery
from resilient_train.core.ring import Ring
from resilient_train.core.state import Clock, RunState
from resilient_train.core.update import EngineGuard
from resilient_train.core.updater import Updater
from resilient_train.data.rows import Collate
from resilient_train.data.samples import Samples, Slicing
from resilient_train.data.sequential import LoaderSamples
from resilient_train.data.trees import state_sha256, weights_sha256
from resilient_train.durable.endings import RunFacts
from resilient_train.durable.keeper import CheckpointKeeper
from resilient_train.durable.progress import Doing
from resilient_train.durable.resume import Resume
from resilient_train.extensions import Extension, load, make_known
from resilient_train.ground.errors import RanksDiffer, Stopped, TrainError, in_one_line, own_error
from resilient_train.ground.reader import ClipConfig, DiskConfig, MemoryConfig
from resilient_train.ground.types import Incident, Signal, UpdateResult
from resilient_train.ground.wording import counted, log, say
from resilient_train.loop import arguments
from resilient_train.loop.arguments import all_checks
from resilient_train.loop.hooks import (
    DirectStepCheck,
    NotePlace,
    RecordedStates,
    TrainersClipper,
    skipped_samples,
    snapshots_in_words,
)
from resilient_train.loop.reporter import REPORT_EVERY, Place, RunReporter, holders, log_to_stderr, place
from resilient_train.loop.run_process import RunProcess
from resilient_train.parts.modes import Attributes, BufferWatch, without_nan_check
from resilient_train.parts.run import Computation, Measured, Objective, Run, mean_metrics
from resilient_train.processes.world import World, is_out_of_memory, reshard

_NO_TOTAL = "this yields the rest of a planned total: give one with Guard(steps=...), or ask for n more updates"
_RECOVERED_AFTER = 50  # accepted updates at least, until an incident counts as recovered
_FROM_THE_START = (
    "make or load the same model on every rank before it is prepared, and change no weights after that; "
    "if the ranks are meant to differ, turn the check replicas off"
)


@dataclass(frozen=True)
class Epoch:
    """An epoch, or the rest of one: iterate over it for its micro-batches."""

    number: int  # from 0
    batches: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


class Guard(EngineGuard):
    """Gate, checks, rewinds, remedies and journal around a training loop."""

    world: World
    samples: Samples
    _parts: Run

    def __init__(
        self,
        accelerator: Accelerator | None,
        model: nn.Module,
        optimizer: Any,
        *,
        data: Any,
        batch_size: int | None = None,
        steps: int | None = None,
        schedule: Any = None,
        objective: Objective | None = None,
        recovery: Any = "balanced",
        checks: Any = "default",
        expect: Sequence[int] = (),
        run_dir: str | Path | None = None,
        clip: ClipConfig | float | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        memory: MemoryConfig | None = None,
        verify_after: int = 20,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate: Collate | None = None,
        disk: DiskConfig | int | None = None,
        drill: Extension | None = None,
        extensions: Sequence[Extension] = (),
        home: Place | None = None,
        resume: Resume | bool = False,
        stop: Callable[[], bool] = lambda: False,
        tracking: str | bool | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Guard a loop: its model as prepared, the optimizer or several, a data set, a loader or a function.

        A loop of plain PyTorch gives None for the Accelerator, and says how many micro-batches it accumulates and which
        `scaler` scales its loss. A function draws a micro-batch with the global generators.
        `steps` is the planned total: a run is complete after so many accepted updates, over all its processes.
        `objective` is `(model, batch) -> loss`; without one the loop computes the loss and passes it to `update`.
        `expect` are steps at which the loss, the model or the data changes on purpose: there is no alarm around them.
        `disk` is the number of updates between two checkpoints in the run directory; with `resume` a run resumes from
        the newest one there. `stop` is called before every update. `tracking` is the address of the MLflow that shows
        the run, or True for the one that MLFLOW_TRACKING_URI names, else for a database next to the run directory.

        `home` is of a caller that reports the end itself; `beat` is called when something slow advances.
        """
        arguments.check_settings(**locals())
        accelerator = arguments.accelerator(accelerator, model, accumulate, scaler)
        world, clock = arguments.world(accelerator), Clock()
        is_own_loop = home is None  # False: the command's, which reports its end itself
        if is_own_loop:
            log_to_stderr(world)
        self.steps, device, scaler = steps, world.device, accelerator.scaler
        name = getattr(objective, "__qualname__", type(objective).__name__)
        measured = objective if isinstance(objective, Measured | None) else Measured(objective, name, key="objective")
        batch_size = arguments.batch_size(batch_size, data, world)
        slicing = Slicing(batch_size, accelerator.gradient_accumulation_steps, world.rank, world.size)
        if device.type == "cpu":
            # glibc adapts its thresholds to the largest block that was ever freed, up to this size. Else it returns
            # memory after each backward and requests it again: 4 ms of a step of 110 ms.
            torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)
        unwrapped = arguments.unwrapped(model, world)
        bare = getattr(unwrapped, "_orig_mod", unwrapped)  # without torch.compile's prefix in the names of weights
        optimizers = arguments.optimizers(optimizer, bare)
        rates = arguments.schedules(schedule, optimizers)
        samples = arguments.samples(data, slicing, world, seed, shuffle, num_workers, collate)
        seeds = RecordedStates(device) if samples.is_fed else Seeds(seed, world.rank, device)
        disk = arguments.disk(disk, resumes=run_dir is not None and resume is True and not samples.is_fed)
        given = [*extensions, *([] if drill is None else [drill])]
        for one in given:
            make_known(type(one))
        config = arguments.checks(checks, expect, [type(one) for one in given])
        policy = arguments.policy(recovery)
        state = RunState(bare, optimizers, rates, samples, clock, device=device, scaler=scaler)
        attributes = Attributes(bare)
        marks = Marks(bare, scaler, state.kept, attributes.undone)
        direct_steps = DirectStepCheck(optimizers)
        clipper = (TrainersClipper if samples.is_fed else Clipper)(
            clip if isinstance(clip, ClipConfig) else ClipConfig(clip, None), world.norm if state.is_sharded else None
        )
        updater = Updater(
            *(optimizers, rates, clipper, world.gather if world.size > 1 else None),
            device=device,
            knobs=Knobs(policy.relax_after),
            scaler=scaler,
            observes=policy.observe,
            stepping=direct_steps,
        )
        several = [kind() for kind in load() if not any(isinstance(one, kind) for one in given)] + given
        checks, best = all_checks(config, several)
        home = home or place(run_dir, world, bool(resume), tracking, disk)
        incidents = home.incident_log
        try:
            buffers = BufferWatch(bare)
            backend = Computation(model, unwrapped, measured, arguments.backward(accelerator), attributes)
            arguments.check_data(samples, incidents, world)
            run = Run(
                world=world,
                clock=clock,
                samples=samples,
                state=state,
                updater=updater,
                ring=Ring(state, memory or MemoryConfig(every=25, keep=5, max_gib=None), world.least),
                checks=checks,
                buffers=buffers,
                across_rewind=buffers.across_rewind,
                policy=policy,
                settings=config,
                best=best,
                backend=backend,
                marks=marks,
                seeds=seeds,
                beat=beat,
                incident_log=incidents,
                planned=lambda: self.steps,
                stop=stop,
                settle=self.settle,
                extensions=several,
            )
            if measured is not None:
                measured.buffers = run.buffers
            keeper = run.keeper = CheckpointKeeper(
                disk, run, incidents, resume if isinstance(resume, Resume) else Resume()
            )
            run.hooks.append(NotePlace(run, keeper.progress))
            run.effects.append(skipped_samples(samples))
            for one in several:
                one.build(run)
            run.hooks += [attributes] * (measured is not None)
            controls = run.controls = Controls(run, keeper, incidents)
            self.reporter = RunReporter(clock, run.updates, best, run.checks, home, keeper.progress)
            self.process = RunProcess(run, self.reporter.fail)
            run.recovery = Recovery(
                *(run, controls, keeper, incidents),
                report=self.reporter.fail,
                agree=self.process.require_agreement,
                recovered_after=max(verify_after, _RECOVERED_AFTER),
            )
            self._direct_steps = direct_steps
            self._keeper = keeper
            self._shows = is_own_loop and home.directory is not None  # on all ranks, which average its numbers
            if world.is_main:
                incidents.sinks += run.sinks
            super().__init__(
                *(run, run.recovery, backend, marks, keeper, seeds),
                fetch=self.process.next_update,
                verify_after=verify_after,
                stop=stop,
            )
            self._owes_resume = bool(resume)
            self._left: Path | None = None  # the state at the end of the loop
            self._handled = sys.exc_info()[1]  # an error that the caller handles with this loop
            if isinstance(samples, LoaderSamples) and not samples.rows:
                log.info("data: bad rows have no names here: the update that has them is skipped")
            if measured is None:
                log.info("lines of code cannot be named without objective=: what guard.update takes cannot be replayed")
        except BaseException:
            if home.lock is not None:
                home.lock.release()  # a notebook keeps the error, and with it the lock, when its cell is run again
            raise
        if home.directory is not None:
            holders[home.directory] = self.reporter

    def keep(self, **items: Stateful) -> None:
        """Let objects with state_dict and load_state_dict rewind with the run, such as an average of the weights."""
        for name, item in items.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                what = f"a {type(item).__name__} has no state_dict and load_state_dict"
                raise TypeError(f"keep({name}=...): {what}, so it cannot rewind")
            if self._has_begun:
                raise TrainError(f"keep({name}=...): the run has begun, and its first state lacks this: call it before")
            for one in item.modules() if isinstance(item, nn.Module) else ():
                if hasattr(one, "persistent"):  # a metric of torchmetrics, which leaves out what it has counted
                    cast(Any, one).persistent(True)
            self.state.keep(name, item)

    def remember(self, name: str, item: Stateful) -> None:
        """Save an object that does not rewind, and restore it when the run resumes."""
        self._keeper.resumption.remembered[name] = item

    def resume(self) -> bool:
        """Resume the run of the run directory, if there is one: after `keep`. Otherwise `batches` does it."""
        self._owes_resume = False
        resumed = self.process.resume()
        self._checks.episode.resumed(self.clock.step)
        self.seeds.between(self.samples.position)
        return resumed

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Yield the epochs that remain of `count`; the first may be the rest of one. An epoch is as many updates as it
        takes to see all the data once. Without `steps` this plans the total.
        """
        length = arguments.steps_per_epoch(self.samples)
        self._start()
        self.steps = count * length if self.steps is None else self.steps
        numbers = range(self.attempted_step // length, min(count, -(-self.steps // length)))
        if not numbers:  # log why, and complete the run if this was its last epoch
            yield from self.batches_until(min(count * length, self.steps))
        for number in numbers:
            if not self.stopped:
                yield Epoch(number, partial(self.batches_until, min((number + 1) * length, self.steps)))

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """Yield micro-batches, on the device, until `steps` more updates are accepted; by default the rest of the plan.
        The last update is verified before this ends. It ends earlier if the loop is `stopped`.
        """
        arguments.check_settings(steps=steps)
        self._start()
        if steps is None and self.steps is None:
            raise TrainError(_NO_TOTAL)
        limits = [self.steps, None if steps is None else self.attempted_step + steps]
        yield from self.batches_until(min(limit for limit in limits if limit is not None))

    def updates(self, steps: int | None = None) -> Iterator[Iterator[Any]]:
        """Yield the micro-batches of each update, for a loop that accumulates in a loop of its own; as `batches`."""
        batches = self.batches(steps)

        def of_one(first: Any) -> Iterator[Any]:
            yield first
            while self._current is not None and not self._turn.has_stepped:
                yield next(batches)

        yield from map(of_one, batches)

    def step(self, batch: Any) -> UpdateResult:
        """Forward, backward, gate, update. Says what became of it: false while gradients accumulate, or if refused."""
        with self._watched():
            return super().step(batch)

    def update(self, loss: torch.Tensor, *, optimizer: Any = None) -> UpdateResult:
        """Continue after the loop's own forward and backward; with `optimizer` the loss is its own, and it steps."""
        loss = self._parts.buffers.spoil(loss)
        if optimizer is None:
            with self._watched():
                return super().update(loss)
        if self.samples.slicing.accumulation > 1:
            raise TrainError("losses in turn cannot accumulate gradients: set gradient_accumulation_steps to 1")
        if self.objective is not None:
            raise TrainError("losses in turn have no objective, which is one loss for all: leave out objective=")
        with self._watched():
            result = self.step_in_turn(loss, optimizer)
        self._updater.drop_gradients(in_turn=True)
        return result

    def settle(self) -> bool:
        """Wait for the verdict on the last update; a turn ends with it. False: an anomaly, and it has been treated."""
        self._keeper.progress.turned_to(Doing.BETWEEN)
        with self._watched():
            return super().settle()

    def leave(self) -> Path | None:
        """Write the state when `batches` has ended, so that the run can resume from it; return its path."""
        self._left = self._left or self._finish_saving(healthy=not self.stopped)
        self.reporter.left_state(self._left)
        return self._left

    def close(self) -> None:
        """End a run, at its last step or before: check the last update, close recovered incidents, end workers."""
        self._put_back_batch()
        handled, self._handled, gave_up = self._handled, None, None
        error = own_error(handled)
        all_close = self.world.size == 1 or error is None or isinstance(error, TrainError)  # else some are in the model
        try:
            if all_close and ((self.settle() and self._examination.examine_now() is None) or self._recovery.observes):
                is_off = error is None and self._recovery.is_unrecovered()
                if is_off and not (self.stopped and self._left):
                    gave_up = self._recovery.end_unrecovered()
                else:
                    if error is None and not is_off:  # else incidents stay open, for the process that resumes
                        self._recovery.finish()
                        if self.steps is None and not self.stopped and self._left is None:
                            self._complete()
                    self._keeper.run_completed()
            if all_close:  # else the reporter knows whether another process was killed
                self.process.ends()
            if gave_up is not None:
                raise gave_up
        finally:
            try:
                self.let_go()  # first: what is being written ends before the directory is another process's
            finally:  # the last update may have been one too many for the policy
                self.reporter.closed(own_error(handled), self.steps)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Note an evaluation, for the tracker and the end of the run. All ranks call it."""
        if self.world.size > 1:
            reshard(self.state.model)
        self.reporter.note_evaluation(metrics)

    @property
    def incidents(self) -> list[Incident]:
        return self._parts.incident_log.incidents

    @property
    def recent_loss(self) -> float | None:
        """The median of the last 50 accepted losses."""
        return self._parts.updates.recent_loss

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Let those who know about exceptions see one that leaves the guard."""
        try:
            yield
        except BaseException as error:
            for one in self._parts.on_error:
                one.escaped(error)
            raise

    # For a trainer.

    def take_norm(self, norm: torch.Tensor | None) -> None:
        """Take the norm of the gradients at hand, if the trainer has measured it before it clipped them."""
        assert isinstance(self._updater.clipper, TrainersClipper)
        self._updater.clipper.norm = norm

    def leave_out(self) -> None:
        """Give up the update at hand."""
        self._put_back_batch()

    def instead(self, error: Exception) -> torch.Tensor:
        """Return the loss of another batch, after its backward, if only the one at hand raises; else raise again."""
        with self._watched():
            if is_out_of_memory(error):  # trainers may start again with smaller batches
                raise error
            computed: Any = self._instead(error, self._require_batch("update"))
        return computed[0].detach()  # type: ignore[no-any-return]  # a trainer adds it to a sum

    # For the command.

    def stop_now(self) -> None:
        self.stopped = True

    def let_go(self) -> None:
        """Undo what affects the whole process: worker processes and patched code."""
        for one in self._parts.extensions:
            try:
                one.close()
            except Exception as error:  # all else has to be closed, too
                log.error("%s could not be closed: %s", type(one).__name__, in_one_line(error))
        self.samples.close()
        self._keeper.wait()
        self._keeper.progress.close()

    def report(self) -> dict[str, float] | None:
        """Return the numbers of the newest update; None if they were reported. All ranks call it, and wait."""
        read = partial(self.world.mean_metrics, mean_metrics(self.reported))
        return self.reporter.report(self.newest, read, self.samples.slicing.samples)

    @property
    def saving_since(self) -> float | None:
        return self._keeper.saving_since

    def batches_until(self, last: int, planned: int | None = None) -> Iterator[Any]:
        self._start()
        self._left = None
        if planned is None and last < sys.maxsize:
            planned = last if self.steps is None else self.steps
        self.reporter.begin(planned)
        if self.attempted_step >= last and not self.stopped:
            what = "of the plan" if planned is None or last >= planned else "that the loop asks for"
            log.info("no batches: nothing is left of the %s %s", counted(last, "step"), what)
        with without_nan_check():
            for batch in self.updates_until(last, plan=self.steps):
                self._direct_steps.running = "loop"
                try:
                    yield batch
                finally:
                    self._direct_steps.running = None
        if self.stopped:
            self.reporter.end(RunFacts(error=Stopped()))
        elif last == self.steps:
            self._recovery.finish()
            self._complete()

    def _start(self) -> None:
        self._handled = sys.exc_info()[1]
        if self._owes_resume and self.resume():
            log.info("resumed from step %d", self.clock.step)
        if not self._has_begun:
            self._keeper.check()
            self._waits = self.world.least(-len(self.state.kept)) < 0 and not self.samples.is_fed  # on every rank
        self._has_begun = True
        self._put_back_batch()
        if self._turn.has_stepped:
            self.settle()
        self.seeds.between(self.samples.position)
        if not self._ring.snapshots and self._pending is None:
            self.process.require_agreement("settings_differ")
            found = self._examination.examine_now() if self.clock.step == 0 else None  # later ones compare with it
            if found is not None and found.signal is Signal.RANK_MISMATCH:
                raise RanksDiffer(f"{say(found.evidence)}, before the first update: {_FROM_THE_START}")
            if self._keeper.is_verified or self._ring.is_due(self.clock.step):  # else no snapshot is taken at this step
                self._controls.snapshot(self.clock.step, verified=self._keeper.is_verified)
            if self._checks.episode.is_open:  # since before the process ended
                self._ring.keep_reference(self.clock.step)

    def _complete(self) -> None:
        """Write the end state of the caller's loop. Every rank comes here: weights may be sharded."""
        # An evaluation, or more steps, may follow: `leave`, `close` or the exit of the process conclude the report.
        writes = self.reporter.place.directory is not None
        self._left = self._finish_saving(healthy=True) if writes else self._left
        digests = (weights_sha256(self.state), state_sha256(self.state)) if writes else None
        self.reporter.end(RunFacts(is_closed=True), digests)

    def _finish_saving(self, *, healthy: bool) -> Path | None:
        effects, is_damaged = self._controls.effects.state_dict(), self._recovery.is_damaged
        left = self._keeper.finish(effects, healthy=healthy, damaged=is_damaged)
        if healthy:
            self._keeper.run_completed()
        self.process.ends()
        return left

    def _on_accepted(self) -> None:
        run, home = self._parts, self.reporter.place
        run.ring.best_step = run.best.step  # whose state is kept
        if self.clock.step == 1 and not run.updates.rewinds:  # optimizers have their moments now
            self._keeper.check()
            log.info("%s", snapshots_in_words(run.ring, run.state))
            if home.directory is not None and self.samples.rows:
                run.incident_log.note("data_seen", rows=self.samples.rows)  # so that a resume notices a change
        if self._shows and self.clock.step % REPORT_EVERY == 0 and (values := self.report()) is not None:
            self.reporter.show(values)
