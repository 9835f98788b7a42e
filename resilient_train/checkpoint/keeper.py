"""Keeps the verified states of a run on disk, and resumes the run from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from resilient_train import __version__
from resilient_train.checkpoint import weights
from resilient_train.checkpoint.manifest import CANDIDATE, VERIFIED, Manifest
from resilient_train.checkpoint.resume import Resume, ResumePlan, Resumption
from resilient_train.checkpoint.safetensors_files import SharedWrite
from resilient_train.checkpoint.store import Entry, Store
from resilient_train.checkpoint.tree_files import SerializedTree
from resilient_train.checkpoint.weights import Best
from resilient_train.checkpoint.writer import DiskConfig, Job, Outcome, Writer
from resilient_train.errors import in_one_line, unusable
from resilient_train.files import Written, at_disk
from resilient_train.record.progress import Progress
from resilient_train.record.run_history import RunHistory
from resilient_train.run_parts import RunParts
from resilient_train.state.ring import Snapshot
from resilient_train.state.run_state import Stateful
from resilient_train.types import ProcessIncident, Signal
from resilient_train.wording import IN_FILE_ONLY, log

_FOR_OTHERS_S = 5.0


class CheckpointKeeper:
    """Offers verified snapshots to the writer, leaves the state of a run that is stopped, and finds it again."""

    def __init__(
        self, config: DiskConfig, parts: RunParts, directory: Path | None, history: RunHistory, how: Resume
    ) -> None:
        """`directory` is None on ranks that write nothing, and where nothing is written."""
        self._config, self._parts, self._run_history, self._how = config, parts, history, how
        self.progress = Progress(directory)
        self._store = Store(directory) if directory is not None else None
        self._best = Best(directory) if directory is not None else None
        # Once, as a user's hooks may take their time.
        self._persistent_names = frozenset(parts.state.model.state_dict(keep_vars=True))
        self._is_sharded = parts.state.is_sharded  # over ranks, so that each of them writes its share
        self._together: Store | None = None  # where ranks write theirs
        if self._is_sharded and (common := parts.world.on_main(lambda: directory)) is not None:
            self._together = self._store or Store(common)
        self._writer: Writer | None = None
        if (store := self._store or self._together) is not None:
            reference = parts.checks.rewind_check.reference_step
            self._writer = Writer(store, keep=config.keep, keep_every=config.keep_every, reference=reference)
        self._label = parts.world.on_main(lambda: uuid4().hex[:12]) if self._is_sharded else ""
        self._given_up = threading.Event()  # of ranks that write along, perhaps because they have died
        self._offered = 0  # checkpoints that were written together
        self.resumption = Resumption(parts, history, self.progress, self._store, directory, how)
        self.samples = 0  # of an update, if the run began with another number of processes
        # The newest step on disk since the last rewind, and the highest step that was ever written.
        self._last_saved = self._highest_saved = 0
        self._last_rewind = (0, 0)  # tick and step of the last rewind
        self._candidate: Entry | None = None  # that the run was resumed from
        self.is_verified, self._is_failing = True, False  # the state that the run resumed at; saving
        self._save_events: list[ProcessIncident | None] = []
        if directory is not None and history.began_with is None:  # now: times are counted from here
            history.note_update_size(parts.world.size, parts.samples.slicing.samples)

    def save_events(self) -> list[ProcessIncident | None]:
        """What is new of saving, oldest first: that it began to fail, or None where it works again."""
        events, self._save_events = self._save_events, []
        return events

    def remember(self, name: str, item: Stateful) -> None:
        """Let something that does not rewind be there again after a resume."""
        self.resumption.remembered[name] = item

    def check(self) -> None:
        """Save all that a checkpoint holds once, to nowhere. Every rank comes here.

        Raises ConfigError, on all of them, where something could never be saved.
        """
        for name, why in filter(None, self._parts.world.all_of(self._unfit())):
            if self._config.every:
                raise unusable(name, why)
            log.warning("%s: %s", name, why)

    def _unfit(self) -> tuple[str, str] | None:
        if self._writer is None:
            return None
        parts = dict(self._parts.state.live())
        parts |= {f"remembered.{name}": item.state_dict() for name, item in self.resumption.remembered.items()}
        for name, part in parts.items():
            try:
                SerializedTree(part)
            except Exception as error:
                called = f"keep({name.removeprefix('kept.')}=...)" if name.startswith("kept.") else name
                return called, f"its state cannot be saved: {in_one_line(error)}"
        return None

    # While the run trains.

    @property
    def saving_since(self) -> float | None:
        """Since when a checkpoint is being written, on the monotonic clock."""
        return self._writer.began if self._writer is not None else None

    @property
    def is_busy(self) -> bool:
        """Say whether this rank could not take its share in a checkpoint now: the others have to know."""
        return self._is_sharded and self._writer is not None and not (self._writer.is_free and self._config.every)

    def verified(self, *, any_busy: bool) -> None:
        """After each healthy update: write the newest verified state, if it is time, and hear what became of others.

        A checkpoint that all ranks have to write is begun by all of them or by none, at the same update: `any_busy`
        is what they have agreed on with it.
        """
        writer = self._writer
        if writer is None:
            return
        self._read_results()
        snapshot = self._parts.ring.newest_verified()
        if snapshot is None:
            return
        if self._is_sharded and self._config.every and snapshot.step - self._last_saved >= self._config.every:
            if not any_busy:
                self._last_saved = snapshot.step  # where that fails, too: ranks would try again at different times
                writer.offer(self._job_of(snapshot))
            return
        if self._store is None or not writer.is_free:
            return
        if self._best is not None and self._best.is_ripe(snapshot.step):
            writer.offer(Job(snapshot.step, self._parts.clock.tick, self._best.write))
        elif self._candidate is not None and snapshot.step >= self._candidate.manifest_step:
            self._prove(self._candidate)
        elif not self._is_sharded and self._config.every and snapshot.step - self._last_saved >= self._config.every:
            writer.offer(self._job_of(snapshot))

    def distrust(self, since: int) -> None:
        """Take note that nothing newer than `since` is to be trusted, what is being written just now included.

        Only that is waited for, and what marks others would meet while the writer removes them.
        """
        writing = self._writer.writing if self._writer is not None else None
        self._read_results()
        written = self._highest_saved, self._best.step if self._best is not None else 0
        if writing is not None and max(writing, *written) > since:
            self.close()
        if self._best is not None:
            self._best.distrust(since)
        if self._candidate is not None and self._candidate.manifest_step > since:
            self._candidate = None
        if self._store is None or since >= self._highest_saved:
            return
        try:
            for entry in self._store.demote(since):
                log.info("the checkpoint %s is not to be trusted any more", entry.path.name)
        except OSError as error:
            log.error("checkpoints that are not to be trusted could not be marked: %s", error.strerror)

    def rewound(self, step: int) -> None:
        """Take note that the run went back to a step."""
        self._read_results()
        self._last_saved = min(self._last_saved, step)
        self._last_rewind = self._parts.clock.tick, step

    def leave(self, snapshot: Snapshot) -> Path | None:
        """Leave a verified state on disk at the end of a run; None where that is not possible. Every rank comes here.

        They wait for the one that writes: a launcher ends all processes soon after the first.
        """
        self.close()
        return self._on_all(lambda: self._written_already(snapshot), lambda: self._now(self._job_of(snapshot)))

    def leave_alone(self, snapshot: Snapshot) -> Path | None:
        """The same of this process alone, while nothing may be asked of others; None where that cannot be."""
        if self._store is None or self._is_sharded:
            return None
        self.close()
        return self._written_already(snapshot) or self._now(self._job_of(snapshot))

    def _on_all(self, first: Callable[[], Path | None], then: Callable[[], Path | None]) -> Path | None:
        """What rank 0 finds `first`, or what `then` writes: rank 0 alone, or all ranks where each has a share."""
        world = self._parts.world
        with at_disk():  # also where it is another rank's
            if not self._is_sharded:
                return world.on_main(lambda: first() or then())
            if (found := world.on_main(first)) is not None:
                return found
            written = then()
            return world.on_main(lambda: written)

    def _written_already(self, snapshot: Snapshot) -> Path | None:
        for entry in self._store.usable() if self._store is not None else ():
            if entry.manifest is not None and entry.manifest.kind == VERIFIED and entry.manifest.step >= snapshot.step:
                return entry.path
        return None

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation of the state as it is: its weights may be the best so far. Every rank comes."""
        world, best, state = self._parts.world, self._best, self._parts.state
        if "loss" not in metrics:
            return
        if self._is_sharded and world.on_main(lambda: best is not None and best.is_better(metrics)):
            tensors = weights.gathered(state.model, keep=world.is_main)
        elif not self._is_sharded and best is not None and best.is_better(metrics):
            tensors = self._exported(state.live())
        else:
            return
        if best is not None:
            best.take(self._parts.clock.step, metrics, tensors)

    def finish(self, remedies: Mapping[str, Any], *, healthy: bool) -> Path | None:
        """Leave the state as it is now: a healthy end verifies it, a stop on request leaves a candidate.

        Every rank comes here, and waits for the one that writes.
        """
        self.close()

        def best() -> None:
            if healthy:
                self._write_best()

        return self._on_all(best, lambda: self._finished(remedies, healthy=healthy))

    def _write_best(self) -> None:
        best, step, tick = self._best, self._parts.clock.step, self._parts.clock.tick
        while best is not None and best.is_ripe(step) and self._writer is not None:
            outcome = self._writer.write_now(Job(step, tick, best.write))
            self._note_result(outcome)
            if outcome.trouble:
                return

    def _finished(self, remedies: Mapping[str, Any], *, healthy: bool) -> Path | None:
        writer, parts = self._writer, self._parts
        if writer is None or (healthy and not self._config.every):
            return None
        kind, last, verified = VERIFIED if healthy else CANDIDATE, self._last_saved, parts.ring.newest_verified()
        left = self._now(self._job(parts.clock.step, kind, parts.state.live, parts.statistics(), remedies))
        if not healthy and verified is not None and max(0, last) < verified.step < parts.clock.step:
            self._now(self._job_of(verified))  # what trouble would go back to, had the run not been stopped
        return left

    def leave_newest(self) -> tuple[int, Path | None]:
        """From another thread, not waiting for the loop or other ranks: leave the newest verified state.

        Returns the step that the run resumes from, and where its state is; None where that is not the newest verified.
        """
        snapshot = self._parts.ring.newest_verified()
        is_newer = snapshot is not None and snapshot.step > max(0, self._last_saved)
        try:
            is_left = not is_newer or (snapshot is not None and self.leave_alone(snapshot) is not None)
            entry = next(self._store.usable(), None) if self._store is not None else None
        except OSError as error:
            log.error("checkpoints cannot be looked at: %s", error.strerror or error)
            return max(0, self._last_saved), None
        return (0, None) if entry is None else (entry.manifest_step, entry.path if is_left else None)

    def rescue(self) -> tuple[int, Callable[[], object]]:
        """From another thread, while the loop hangs: how many steps are lost, and what writes the newest state."""
        step, snapshot = self._parts.clock.step, self._parts.ring.newest_verified()
        is_free = self._writer is not None and self._writer.is_free and not self._is_sharded  # it would take the others
        newer = snapshot if snapshot is not None and snapshot.step > self._last_saved and is_free else None
        lost = step - (newer.step if newer is not None else max(0, self._last_saved))  # by the start that follows

        def write() -> None:
            if newer is not None and self._writer is not None:
                self._writer.write_now(self._job_of(newer))

        return max(0, lost), write

    def close(self, seconds: float | None = None) -> None:
        """Let what is being written be finished."""
        if self._writer is not None:
            self._writer.wait(seconds)
            self._read_results()

    def let_go(self) -> None:
        """End with the run. Ranks that are to write along may be gone: they are given a moment."""
        if self._is_sharded:
            self.close(_FOR_OTHERS_S)
            self._given_up.set()
        self.close()

    # Resuming.

    def begin(self, plan: ResumePlan) -> None:
        """Put the run where it is resumed from. Every rank comes here."""
        self.samples = plan.samples
        if plan.path is not None:
            self._load(Entry.of(plan.path), resuming=True)

    def restore(self, since: int) -> bool:
        """Go back to the newest verified checkpoint not after `since`; False: none can be read. Every rank comes."""
        self.close()
        with at_disk():
            path = self._parts.world.on_main(lambda: self.resumption.newest(lambda one: one.is_verified(since), []))
        if path is not None:
            self._load(Entry.of(path), resuming=False)
        return path is not None

    def has_verified(self, since: int) -> bool:
        """Say whether `restore` has something to go back to, as far as its manifest tells."""
        self.close()
        with at_disk():
            return self._parts.world.on_main(
                lambda: self._store is not None and any(one.is_verified(since) for one in self._store.usable())
            )

    # How it is done.

    def _job_of(self, snapshot: Snapshot) -> Job:
        self._parts.ring.settled()
        snapshot.is_being_written = True

        def done() -> None:
            snapshot.is_being_written = False

        def state() -> Mapping[str, Any]:
            return snapshot.parts

        return self._job(snapshot.step, VERIFIED, state, snapshot.statistics, snapshot.remedies, done)

    def _job(
        self,
        step: int,
        kind: str,
        state: Callable[[], Mapping[str, Any]],
        statistics: Any,
        remedies: Mapping[str, Any],
        done: Callable[[], None] = lambda: None,
    ) -> Job:
        """What is to be written. All that takes time is left to the thread that writes."""
        parts, store, tick = self._parts, self._store, int(remedies["tick"])
        together = None
        if self._together is not None:
            self._offered += 1
            together = SharedWrite(parts.world.rank, parts.world.size, f"{self._label}-{self._offered}", self._given_up)
        updates = self._parts.updates.copy()
        memory = {
            "statistics": statistics,
            "panel": parts.checks.persistent_state(),
            "lasting": sorted(self._persistent_names),  # the names that a state_dict has
            "remembered": {name: item.state_dict() for name, item in self.resumption.remembered.items()},
        }

        def described(position: int, files: dict[str, Written]) -> Manifest:
            return Manifest(
                kind=kind,
                step=step,
                tick=tick,
                position=position,
                world=parts.world.size,
                samples=parts.samples.slicing.samples,
                each=self.resumption.each,
                config=self._how.config,
                made_by=f"resilient_train {__version__}, torch {torch.__version__}",
                at=time.time_ns() // 1_000_000,
                mlflow=self._how.mlflow(),
                remedies=dict(remedies),
                groups=self.resumption.configured,
                files=files,
            )

        def write() -> Entry | None:
            if store is None:
                assert together is not None
                assert self._together is not None
                self._together.write_share(state, together)
                return None
            parts_of_state = state()
            describe = partial(described, int(parts_of_state["position"]["position"]))
            memory["passed"] = updates.state_dict(step)
            exported = {} if self._is_sharded else self._exported(parts_of_state)
            entry = store.write(describe, parts_of_state, exported, memory, together)
            self._run_history.note_checkpoint(step, tick)
            return entry

        return Job(step, tick, write, done)

    def _prove(self, entry: Entry) -> None:
        """Say of the candidate that the run was taken up from that it is verified now."""
        store, writer = self._store, self._writer
        assert store is not None
        assert writer is not None
        assert entry.manifest is not None
        self._candidate = None
        step, tick = entry.manifest.step, entry.manifest.tick

        def mark() -> Entry:
            marked = store.mark(entry, VERIFIED)
            self._run_history.note_checkpoint(step, tick)
            return marked

        writer.offer(Job(step, tick, mark))

    def _exported(self, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The weights and buffers that other programs want."""
        kept = {name: parts["buffers"][name] for name in parts["buffers"] if name in self._persistent_names}
        return {**parts["weights"], **{name: one for name, one in kept.items() if one is not None}}

    def _now(self, job: Job) -> Path | None:
        if self._writer is None:
            return None
        self.close()
        outcome = self._writer.write_now(job)
        self._note_result(outcome)
        return outcome.entry.path if outcome.entry is not None else None

    def _read_results(self) -> None:
        while self._writer is not None and (outcome := self._writer.next_outcome()) is not None:
            self._note_result(outcome)

    def _note_result(self, outcome: Outcome) -> None:
        step = outcome.job.step
        if self._store is None:
            if outcome.trouble:  # rank 0 hears of it as well, and writes it down
                log.error("this rank's share of step %d could not be written: %s", step, outcome.trouble)
        elif not outcome.trouble:
            if outcome.entry is not None:
                self._highest_saved = max(self._highest_saved, step)
                turned_at, to = self._last_rewind
                self._last_saved = max(self._last_saved, step if outcome.job.tick > turned_at else min(step, to))
            if self._is_failing:
                log.info("checkpoints are saved again: step %d", step)
                self._is_failing = False
                self._save_events.append(None)
        elif not self._is_failing:
            self._is_failing = True
            what = f"the checkpoint of step {step:,} could not be written: {outcome.trouble}"
            signal = Signal.DISK_FULL if outcome.is_disk_full else Signal.CHECKPOINT_FAILED
            self._save_events.append(ProcessIncident(signal, step, step, what, "try_again"))
            if not outcome.is_disk_full:
                log.info("the writer of checkpoints failed", exc_info=outcome.error, extra=IN_FILE_ONLY)

    def _load(self, entry: Entry, *, resuming: bool) -> None:
        self.resumption.load(entry, resuming=resuming)
        parts, store = self._parts, self._store
        known = store or self._together  # ranks that write along have to count along
        is_own = known is not None and entry.path.parent == known.path
        is_candidate = entry.manifest is not None and entry.manifest.kind == CANDIDATE
        self._candidate = entry if is_candidate and is_own and store is not None else None
        self.is_verified = not is_candidate  # on ranks, too, that write nothing: they take the same snapshots
        self._last_saved = parts.clock.step if is_own else 0
        if is_own and store is not None:
            self._highest_saved = max([self._highest_saved, *(one.manifest_step for one in store.entries())])
