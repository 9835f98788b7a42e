"""What a run resumes from: the newest checkpoint that verifies, and what became of the previous process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_train.checkpoint.manifest import Damaged, Manifest
from resilient_train.checkpoint.store import Entry, Saved, Store
from resilient_train.errors import ConfigError, TrainError, in_one_line, unusable
from resilient_train.record import endings, notes
from resilient_train.record.notes import Hung
from resilient_train.record.progress import Doing, Progress
from resilient_train.record.run_history import RunHistory
from resilient_train.recover.knobs import Knobs
from resilient_train.run_parts import RunParts
from resilient_train.secrets import masked
from resilient_train.state.mismatch import explain_mismatch
from resilient_train.state.run_state import Stateful
from resilient_train.types import Incident, ProcessIncident, Signal
from resilient_train.update.updater import LR_OF_GUARD
from resilient_train.wording import log


@dataclass(frozen=True, slots=True)
class Resume:
    """How a run is to be resumed."""

    source: Path | None = None  # another place than its newest checkpoint
    config: str = ""  # digest of the configuration
    changed: tuple[str, ...] = ()  # keys of the configuration that are not what they were
    mlflow: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What rank 0 found, for all ranks."""

    path: Path | None
    tick: int = 0
    remedies: tuple[Mapping[str, Any], ...] = ()  # in force, the latest last
    found: tuple[ProcessIncident, ...] = ()  # to be written down
    incidents: tuple[Incident, ...] = ()  # of the processes before this one: strikes count on every rank
    skipped: tuple[int, int] | None = None  # samples that are to blame for the end of processes
    samples: int = 0  # of an update, if the run began with another number of processes


@dataclass
class Resumption:
    """Looks for checkpoints, reads them, and puts them into the run."""

    parts: RunParts
    history: RunHistory
    progress: Progress
    store: Store | None  # None on ranks that write nothing
    directory: Path | None
    how: Resume
    remembered: dict[str, Stateful] = field(default_factory=dict)  # what does not rewind
    read_already: dict[Path, Saved] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.configured = _configured(self.parts)
        slicing = self.parts.samples.slicing  # before anything is cut otherwise
        self.each = slicing.batch_size * slicing.accumulation

    def plan(self, incidents: Sequence[Incident], crashes: int, *, is_explained: bool) -> ResumePlan:
        """Find what to resume from, and what is to be said about the unexplained end of the previous process.

        After `crashes` such ends in a row the samples at work are to blame.
        """
        history, last = self.history, self.progress.last
        hung = self._hung()
        damaged: list[tuple[Entry, str]] = []
        if self.store is not None:
            self.store.sweep()
        path = self._from_named()
        if path is None and self.store is not None:
            path = self.newest(lambda one: True, damaged)
        if path is None and (history.has_saved or damaged):
            why = "; ".join(f"{one.path.name} {reason}" for one, reason in damaged) or "they are gone"
            where = self.store.path if self.store else "memory"
            raise TrainError(
                f"cannot resume: no usable checkpoint in {where}: {why}. run.resume=never starts a new run"
            )
        entry = Entry.of(path) if path else None
        step = entry.manifest_step if entry else 0
        found = [_damage(one, why, step) for one, why in damaged]
        skipped, span = None, last.stop - last.start
        is_updating = last.doing in (Doing.UPDATING, Doing.FIRST)
        if self.directory is not None and endings.failure(self.directory, in_training=True) is not None:
            is_explained = True
        if not is_explained and (is_updating or last.doing is Doing.HUNG) and 0 < span <= _MOST_BLAMED:
            times = history.note_process_end(last.tick, last.start, last.stop, in_first=last.doing is Doing.FIRST)
            skipped = (last.start, last.stop) if times >= crashes else None
        if last.tick and not is_explained and (skipped or is_updating or last.doing is Doing.BETWEEN):
            found.append(self._crash(step, skipped, hung, incidents))
        remedies = [entry.manifest.remedies] if entry and entry.manifest else []
        remedies += [dict(history.remedies)] if history.remedies else []
        latest_last = sorted(remedies, key=_tick_of)  # the journal's behind those of a checkpoint of the same tick
        return ResumePlan(
            *(path, last.tick, tuple(latest_last), tuple(found), tuple(incidents), skipped),
            samples=self._samples_before(entry),
        )

    def _samples_before(self, entry: Entry | None) -> int:
        """What an update was made of, where that is to be kept: each process brings as many, and there are others."""
        history, slicing = self.history, self.parts.samples.slicing
        if entry is not None and entry.manifest is not None:
            samples, each = entry.manifest.samples, entry.manifest.each
        else:
            processes, samples = history.began_with or (self.parts.world.size, slicing.samples)
            each = samples // processes
        return samples if samples != slicing.samples and each == self.each else 0

    def newest(self, wanted: Callable[[Entry], bool], damaged: list[tuple[Entry, str]]) -> Path | None:
        """The newest checkpoint that is wanted, verifies and fits; what does not is added to `damaged`."""
        for entry in self.store.entries() if self.store is not None else []:
            if entry.manifest is None:
                damaged.append((entry, entry.damage))
            elif entry.is_usable and wanted(entry):
                try:
                    self.read_already[entry.path] = self.read(entry)
                except Damaged as why:
                    damaged.append((entry, str(why)))
                else:
                    return entry.path
        return None

    def read(self, entry: Entry) -> Saved:
        """Read a checkpoint, and see whether it is one of this run. Raises Damaged."""
        if entry.path in self.read_already:
            return self.read_already.pop(entry.path)
        parts, manifest = self.parts, entry.manifest
        if manifest is None:
            raise Damaged(entry.damage)
        live = parts.state.live()
        # All have the same files before them: rank 0 reads them through for all.
        saved = Store.load(entry, parts.world.device, live["weights"], is_verified=not parts.world.is_main)
        why = explain_mismatch(live, saved.parts, parts.state.model, parts.state.optimizers)
        has_changed = any(key.startswith(_SHAPES) for key in self.how.changed)
        is_of_others = manifest.each == self.each and not manifest.samples % self.each  # of another number of processes
        if not why and manifest.samples != parts.samples.slicing.samples and not is_of_others:
            why = f"an update was made of {manifest.samples} samples, and is to be of {parts.samples.slicing.samples}"
            if not has_changed:
                raise TrainError(f"cannot resume from {entry.path}: {why}")
        if why and has_changed:
            key = next(key for key in _SHAPES if any(one.startswith(key) for one in self.how.changed))
            raise unusable(key, f"{entry.path} does not fit it as it is now: {why}")
        if why:
            raise Damaged(f"does not fit this run: {why}")
        try:
            Knobs().load_state_dict(manifest.remedies["knobs"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Damaged(f"holds knobs that no run has: {in_one_line(error)}") from error
        if not {"statistics", "passed", "panel", "remembered"} <= saved.memory.keys():
            raise Damaged("lacks what the checks remember")
        return saved

    def load(self, entry: Entry, *, resuming: bool) -> None:
        """Make a checkpoint the state of the run; `resuming`, what the process had in memory as well."""
        run, manifest, saved = self.parts, entry.manifest, self.read(entry)
        assert manifest is not None
        made, parts = f"{entry.path}, written by {manifest.made_by}", run.state.reshard(saved.parts)
        if resuming and any(key.startswith(("optimizer.", "schedule.")) for key in self.how.changed):
            fresh = run.state.live()  # schedules as they are configured now, led to where the run stands
            parts |= {name: fresh[name] for name in parts if name.startswith("schedule.")}
        now = [[dict(group) for group in optimizer.param_groups] for optimizer in run.updater.optimizers]
        try:
            run.state.restore(parts)
            if lacking := run.restore_statistics(saved.memory["statistics"]):
                log.info("%s, has no statistics of %s: these start empty", made, ", ".join(lacking))
            if resuming:
                run.checks.load_persistent_state(saved.memory["panel"])
                run.updates.load_state_dict(saved.memory["passed"])
                for name, item in self.remembered.items():
                    item.load_state_dict(saved.memory["remembered"][name])
            self._as_configured(manifest, now)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            raise TrainError(f"{made}, holds no state of this run as this version has it: {what}") from error
        run.updater.note_rates()
        run.updater.accept(run.clock.step)
        run.clock.tick = max(run.clock.tick, manifest.tick)

    def _from_named(self) -> Path | None:
        """The checkpoint that was asked for by name, the first time: a restart resumes where that has led."""
        source, history = self.how.source, self.history
        if source is None or (masked(str(source)) in history.sources and history.has_saved):
            return None
        if not source.is_dir():
            why = "no such directory; expected auto, never, or the directory of a checkpoint or of a run"
            raise ConfigError("run.resume", str(source), why)
        entries = list(Store(source).usable()) if Store(source).path.is_dir() else [Entry.of(source)]
        why = "there is no checkpoint"
        for entry in entries:
            try:
                self.read_already[entry.path] = self.read(entry)
            except Damaged as reason:
                why = str(reason)
                continue
            self._leave_own_way(entry)
            self.history.note_source(str(source))
            return entry.path
        raise TrainError(f"run.resume={source}: no usable checkpoint there: {why}")

    def _leave_own_way(self, entry: Entry) -> None:
        """The run resumes from a state that was named: its own later checkpoints are not used any longer."""
        if self.store is None:
            return
        if entry.path.absolute().parent == self.store.path.absolute():
            for one in self.store.demote(entry.manifest_step):
                log.info("%s lies ahead of that: it goes once something newer is verified", one.path.name)
        elif any(True for _ in self.store.usable()):
            why = f"{self.store.path.parent} holds checkpoints of its own: choose another run.name"
            raise ConfigError("run.resume", entry.path, why)

    def _hung(self) -> str:
        """What other ranks have noted of a hang that rank 0 could not tell of."""
        place = self.directory
        noted = notes.found(place, Hung) if place is not None else []
        if not noted or place is None:
            return ""
        notes.clear(place, Hung)
        return notes.who_hung(noted, max(self.parts.world.size, noted[-1].rank + 1))

    def _crash(
        self, step: int, skipped: tuple[int, int] | None, hung: str, incidents: Sequence[Incident]
    ) -> ProcessIncident:
        last = self.progress.last
        at = f"update {last.step + 1:,}" if last.doing is not Doing.BETWEEN else f"the time after step {last.step:,}"
        evidence = f"the previous process died during {at}"
        if last.doing is not Doing.HUNG:
            evidence += f": {hung}" if hung else " without logging anything"
        rows: tuple[int, ...] = ()
        if skipped:
            evidence += ", and the one before that at the same samples: they are passed over"
            rows = _narrowed(self.parts.samples.rows_at(*skipped), incidents)
        advice = f"Look at {_some(rows)} of the data: with that the process ended twice." if rows else ""
        remedy, lost = "skip" if skipped else "go_on", max(0, last.step - step)
        signal = Signal.HANG if last.doing is Doing.HUNG or hung else Signal.CRASH
        return ProcessIncident(signal, last.step + 1, step, evidence, remedy, advice, rows, step, lost)

    def _as_configured(self, manifest: Manifest, now: list[list[dict[str, Any]]]) -> None:
        """Apply what was configured differently since the checkpoint was written."""
        optimizers = self.parts.updater.optimizers
        for optimizer, new, old, fresh in zip(optimizers, self.configured, manifest.groups, now, strict=True):
            for group, ours, theirs, mine in zip(optimizer.param_groups, new, old, fresh, strict=True):
                for key in ours:
                    if ours[key] != theirs.get(key):
                        group[key] = mine[key]


def _narrowed(rows: tuple[int, ...], incidents: Sequence[Incident]) -> tuple[int, ...]:
    """In every epoch the rows come in other company: those that were there each time are to blame."""
    earlier = [{*one.diagnosis.rows} for one in incidents if one.anomaly.signal in _ENDINGS]
    common: list[set[int]] = [shared for one in earlier if (shared := {*rows} & one)]
    if not common:
        return rows
    least: set[int] = min(common, key=len)
    return tuple(sorted(least))


def _configured(parts: RunParts) -> list[list[dict[str, Any]]]:
    """What each parameter group was configured to, as JSON has it."""
    return [
        [
            json.loads(json.dumps({key: group[key] for key in group if key not in _NO_SETTINGS}, default=str))
            for group in optimizer.param_groups
        ]
        for optimizer in parts.updater.optimizers
    ]


_SHAPES = ("model", "optimizer", "data.batch_size", "accelerate")  # what decides whether a state fits
_MOST_BLAMED = 2**24  # samples of one update: the record is no more than a hint
_ENDINGS = (Signal.CRASH, Signal.HANG)
_NO_SETTINGS = ("params", LR_OF_GUARD)


def _damage(entry: Entry, why: str, step: int) -> ProcessIncident:
    what = f"{entry.path.name} {why}"
    return ProcessIncident(Signal.CHECKPOINT_DAMAGED, step + 1, step, what, "fall_back", rewound_to=step)


def _tick_of(remedies: Mapping[str, Any]) -> int:
    tick = remedies.get("tick")
    return tick if type(tick) is int else 0


def _some(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    word = "row" if len(rows) == 1 else "rows"
    return f"{word} {shown} and {len(rows) - 8} more" if len(rows) > 8 else f"{word} {shown}"
