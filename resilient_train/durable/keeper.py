"""Saves the verified states of a run to disk while it trains and when it ends, and puts it back to a checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from resilient_train.core.ring import Snapshot
from resilient_train.core.tree import put_together, taken_apart
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.manifest import CANDIDATE, VERIFIED, Entry, Manifest
from resilient_train.durable.progress import Progress
from resilient_train.durable.resume import Resume, ResumePlan, Resumption, RunParts, incidents_of_damage
from resilient_train.durable.store import Store
from resilient_train.durable.tree_files import SerializedTree, gathered
from resilient_train.durable.writer import Job, Writer
from resilient_train.ground.errors import in_one_line, unusable
from resilient_train.ground.files import at_disk
from resilient_train.ground.reader import DiskConfig
from resilient_train.ground.types import Action, Anomaly, Decision, Outcome, Signal, by_signal, fact
from resilient_train.ground.wording import IN_FILE_ONLY, log

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class CheckpointKeeper:
    def __init__(self, config: DiskConfig, parts: RunParts, incidents: IncidentLog, how: Resume) -> None:
        directory = incidents.directory
        self._config, self._parts, self.incident_log = config, parts, incidents
        self.progress = Progress(directory)
        self._commits = directory is not None  # this rank writes checkpoints
        # Once, as a user's hooks may take their time.
        self._persistent_names = frozenset(parts.state.model.state_dict(keep_vars=True))
        self._is_sharded = parts.state.is_sharded  # all ranks gather what a checkpoint holds, at the same update
        common = parts.world.on_main(lambda: directory)
        self._writes, self._store = common is not None, Store(common or Path(os.devnull))
        self._writer = Writer()
        self.resumption = Resumption(parts, incidents, self.progress, self._store, how)
        self._begun = (0, 0)  # tick and step of the newest verified checkpoint that was begun, the same on all ranks
        self._due_at_once = (-config.every, 0)  # in place of one that was demoted, or a candidate
        self.is_verified = True  # the state that the run was resumed from
        self._is_failing = False

    def check(self) -> None:
        """Raise ConfigError on all ranks, each of which calls this, if a state could never be saved."""
        mine = self._unfit() if self._config.every else ""  # what is kept may gather its state over all ranks
        if why := self._parts.world.on_main(lambda: mine):
            raise unusable("checkpoint.disk.every", f"the state of the run cannot be saved: {why}")

    def _unfit(self) -> str:
        remembered = {name: item.state_dict() for name, item in self.resumption.remembered.items()}
        try:
            tree = {**self._parts.state.live(), "remembered": remembered}
            SerializedTree(put_together(*taken_apart(tree), lambda local, sharding: local))
        except Exception as error:
            return in_one_line(error)
        return ""

    @property
    def saving_since(self) -> float | None:
        """When the checkpoint that is being written was begun, on the monotonic clock."""
        writing = self._writer.writing
        return writing.began if writing is not None else None

    def verified(self) -> None:
        """After each healthy update, write the newest verified state if a checkpoint is due. All ranks of a sharded run
        gather it at the same update, once rank 0 can write it. Training waits for that. What fails is tried again when
        the next one is due: else the ranks would try again at different times.
        """
        writer, every = self._writer, self._config.every
        self._read_outcomes()
        may_write = self._commits or (self._writes and self._is_sharded)
        if not may_write or (snapshot := self._parts.ring.newest_verified()) is None:
            return
        if not every or _tick(snapshot) - self._begun[0] < every:  # in ticks, which no rewind takes back
            return
        is_free = writer.writing is None
        if self._is_sharded:
            is_free = self._parts.world.on_main(lambda: writer.writing is None)
        if is_free and (job := self._job(snapshot)) is not None:
            writer.offer(job)

    def distrust(self, since: int) -> None:
        """Demote every checkpoint after `since`, the newest step that can be trusted. Waits for the one being written
        if it is newer.
        """
        writing = self._writer.writing
        self._read_outcomes()
        if writing is not None and writing.step > since:
            self.wait()
        if self._begun[1] > since:
            self._begun = self._due_at_once
        try:
            if self._commits:
                self._store.demote(since)
        except OSError as error:
            log.error("checkpoints that may contain damage could not be demoted: %s", error.strerror)

    def note_incident(self, anomaly: Anomaly, remedy: str, *, rows: tuple[int, ...] = (), **done: Any) -> None:
        """Write down an incident of the process, the disk or a file, about which something was done already."""
        diagnosis = by_signal(anomaly)
        if rows:
            diagnosis = replace(diagnosis, rows=rows, advice=fact("died_twice", rows=[*rows]))
        opened = self.incident_log.open(anomaly, diagnosis, Decision((Action(remedy),)), **done)
        self.incident_log.record_treatment(opened)

    def run_completed(self) -> None:
        """Close the incident about checkpoints that cannot be saved: otherwise a success does."""
        self.incident_log.close_saving(Outcome.UNRECOVERED if self._is_failing else Outcome.RECOVERED)

    # When a run ends. The newest verified snapshot is written unless a checkpoint as new is there.

    def save(self, snapshot: Snapshot) -> Path | None:
        """Write a snapshot; None if that failed. All ranks wait: a launcher ends them soon after the first."""
        self.wait()
        with at_disk():
            on_main = self._parts.world.on_main
            if (known := on_main(lambda: self._path_of(snapshot))) is not None:
                return known
            path = self._save_now(snapshot) if self._is_sharded else on_main(lambda: self._save_now(snapshot))
            return on_main(lambda: path)

    def save_alone(self, snapshot: Snapshot) -> Path | None:
        """As `save`, but only this process calls it; None if the state is sharded, as that takes all ranks."""
        if not self._commits or self._is_sharded:
            return None
        self.wait()
        return self._path_of(snapshot) or self._save_now(snapshot)

    def rescue(self) -> tuple[int, Callable[[], object]]:
        """From another thread, while the loop hangs: the steps that are lost, and a function that saves the others."""
        snapshot = self._parts.ring.newest_verified()  # not from the disk, which may hang
        if snapshot is None or not self._commits or self._is_sharded or self._writer.writing is not None:
            return max(0, self._parts.clock.step - self._begun[1]), lambda: None
        return self._parts.clock.step - max(snapshot.step, self._begun[1]), partial(self.save_alone, snapshot)

    def finish(self, effects: Mapping[str, Any], *, healthy: bool, damaged: bool = False) -> Path | None:
        """Write the present state: verified at a healthy end without damage, else a candidate. All ranks call this."""
        parts, is_verified = self._parts, healthy and not damaged
        self.wait()
        if not self._writes or (healthy and not self._config.every):
            return None
        verified, state = parts.ring.newest_verified(), put_together(*taken_apart(parts.state.live()))
        present = Snapshot(parts.clock.step, state, checks_state=parts.checks_state(), effects=effects)
        present.verified = is_verified
        path = self.save(present)
        if not is_verified and verified is not None and verified.step < present.step:
            self.save(verified)  # to go back to, should the candidate be bad
        return path

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._writer.wait()
        self._read_outcomes()

    def begin(self, plan: ResumePlan) -> None:
        """Load the checkpoint that the run resumes from. All ranks call this."""
        if plan.path is not None:
            self._load(Entry.of(plan.path), plan.tick, resuming=True)

    def restore(self, since: int) -> Path | None:
        """Load the newest verified checkpoint not after `since`; return its path. All ranks call this."""
        self.wait()
        damaged: list[tuple[Entry, str]] = []
        with at_disk():
            newest = self.resumption.newest_readable
            entry = self._parts.world.on_main(lambda: newest(self._verified_until(since), damaged))
        if entry is not None:
            self._load(entry, resuming=False)
            for found in incidents_of_damage(damaged, entry.step, self._parts.clock.tick):
                self.note_incident(**found)
        return entry.path if entry is not None else None

    def has_verified(self, since: int) -> bool:
        """Say whether there is a checkpoint for `restore`, as far as manifests say. All ranks call this."""
        self.wait()
        with at_disk():
            return self._parts.world.on_main(lambda: bool(self._verified_until(since)))

    def _verified_until(self, since: int) -> list[Entry]:
        return [one for one in self._store.usable() if one.kind == VERIFIED and one.step <= since]

    def _load(self, entry: Entry, tick: int = 0, *, resuming: bool) -> None:
        self.resumption.load(entry, resuming=resuming)
        is_own = entry.path.parent == self._store.path
        # On ranks that write nothing, too: all take the same snapshots.
        self.is_verified = entry.kind != CANDIDATE
        begun = (max(tick, self._parts.clock.tick), self._parts.clock.step) if self.is_verified else self._due_at_once
        self._begun = begun if is_own else (0, 0)

    def _path_of(self, snapshot: Snapshot) -> Path | None:
        """Return the path of a checkpoint that is as new."""
        usable = self._store.usable()
        new = (one for one in usable if one.kind == VERIFIED and one.manifest.tick >= _tick(snapshot))
        return next((one.path for one in new), None)

    def _write_now(self, job: Job) -> Job:
        self._writer.write_now(job)
        self._read_outcomes()
        return job

    def _save_now(self, snapshot: Snapshot) -> Path | None:
        job = self._job(snapshot) if self._writes else None
        entry = self._write_now(job).entry if job is not None else None
        return entry.path if entry is not None else None

    def _job(self, snapshot: Snapshot) -> Job | None:
        """Make a job that writes a snapshot, on rank 0 alone. All ranks gather a sharded state for it."""
        parts, store = self._parts, self._store
        parts.ring.copier.wait()
        content = gathered(snapshot.parts, keep=self._commits) if self._is_sharded else snapshot.parts
        step, tick = snapshot.step, _tick(snapshot)
        # One that was demoted may have left this state on the disk.
        is_saved = self._commits and self._begun == self._due_at_once and self._path_of(snapshot) is not None
        if snapshot.verified:
            self._begun = tick, step
        if not self._commits or is_saved:
            return None
        persistent = {
            "statistics": snapshot.checks_state,
            "panel": parts.checks.persistent_state(),
            "passed": parts.updates.state_dict(step),
            "remembered": {name: item.state_dict() for name, item in self.resumption.remembered.items()},
        }

        def write() -> Entry:  # it holds the snapshot meanwhile
            manifest = Manifest(
                kind=VERIFIED if snapshot.verified else CANDIDATE,
                step=step,
                tick=tick,
                samples=parts.samples.slicing.samples,
                each=self.resumption.samples_per_process,
                effects=dict(snapshot.effects),
                groups=self.resumption.configured,
                files={},
            )
            buffers = {name: one for name, one in content["buffers"].items() if name in self._persistent_names}
            exported = content["weights"] | {name: one for name, one in buffers.items() if one is not None}
            entry = store.write(manifest, content, exported, persistent)
            self.incident_log.note("checkpoint_saved", step=step, tick=tick)
            reference = parts.checks.episode.reference
            with suppress(OSError):  # the new one was read back before it was committed
                store.prune(self._config.keep, self._config.keep_every, reference.step if reference else None)
            return entry

        return Job(step, write)

    def _read_outcomes(self) -> None:
        while self._writer.finished:
            self._note_outcome(self._writer.finished.popleft())

    def _note_outcome(self, job: Job) -> None:
        step, was_failing = job.step, self._is_failing
        self._is_failing = job.error is not None
        if job.error is None:
            self.incident_log.close_saving(Outcome.RECOVERED)
        elif not was_failing:
            is_full = getattr(job.error, "errno", None) in _NO_ROOM
            why = getattr(job.error, "strerror", None) or in_one_line(job.error)
            signal = Signal.DISK_FULL if is_full else Signal.CHECKPOINT_FAILED
            evidence = fact("not_written", step=step, why=why)
            self.note_incident(Anomaly(signal, step, self._parts.clock.tick, step, evidence), "try_again")
            if not is_full:
                log.info("the writer of checkpoints failed", exc_info=job.error, extra=IN_FILE_ONLY)


def _tick(snapshot: Snapshot) -> int:
    return int(snapshot.effects["tick"])
