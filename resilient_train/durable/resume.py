"""Finds the checkpoint that a run resumes from, loads it, and explains how the previous process ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_train.core.copies import Stateful
from resilient_train.core.protocols import Parts
from resilient_train.core.state import LR_OF_GUARD, RunState, weights_of
from resilient_train.core.tree import Tree
from resilient_train.data.history import UpdateHistory
from resilient_train.data.samples import Samples
from resilient_train.durable import endings
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.manifest import DEMOTED, NO_MANIFEST, Damaged, Entry
from resilient_train.durable.progress import Doing, Progress
from resilient_train.durable.store import Saved, Store
from resilient_train.durable.tree_files import reshard
from resilient_train.ground.errors import ConfigError, TrainError, in_one_line, unusable
from resilient_train.ground.secrets import masked
from resilient_train.ground.types import Anomaly, Incident, Signal, fact
from resilient_train.ground.wording import log
from resilient_train.processes.world import World


@dataclass(kw_only=True)
class RunParts(Parts):
    world: World
    samples: Samples
    updates: UpdateHistory = field(default_factory=UpdateHistory)
    beat: Callable[[], None] = lambda: None  # called during long work, to show the watchdog its progress


_SHAPES = ("model", "optimizer", "data.batch_size", "accelerate")  # keys that decide whether a state fits


@dataclass(frozen=True, slots=True)
class Resume:
    source: Path | None = None  # a run or checkpoint that the user named, instead of the run's newest checkpoint
    changed: tuple[str, ...] = ()  # keys of the configuration with another value than before


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What rank 0 found out, for all ranks."""

    path: Path | None  # of the checkpoint
    tick: int
    effects: Mapping[str, Any]  # of remedies: those of the checkpoint, or of the journal if they are newer
    found: tuple[dict[str, Any], ...]  # incidents to be noted, as the keeper's `note_incident` takes them
    incidents: tuple[Incident, ...]  # of earlier processes: every rank needs them to decide alike
    skipped: tuple[int, int] | None  # samples at which the process ended repeatedly
    previous_samples_per_update: int  # to be kept, as the number of processes has changed; 0: nothing to keep


@dataclass
class Resumption:
    parts: RunParts
    history: IncidentLog
    progress: Progress
    store: Store
    how: Resume
    remembered: dict[str, Stateful] = field(default_factory=dict)  # by name, what does not rewind
    already_read: dict[Path, Saved] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = [  # the settings of each parameter group, as configured
            [{key: one for key, one in group.items() if key not in ("params", LR_OF_GUARD)} for group in groups]
            for groups in (optimizer.param_groups for optimizer in self.parts.updater.optimizers)
        ]
        self.configured: list[list[dict[str, Any]]] = json.loads(json.dumps(groups, default=str))
        slicing = self.parts.samples.slicing  # as configured: it may change later
        self.samples_per_process = slicing.batch_size * slicing.accumulation

    def plan(self, crashes: int) -> ResumePlan:
        """Find the checkpoint to resume from; skip samples at which `crashes` processes in a row ended unexplained."""
        history, last = self.history, self.progress.last
        incidents, directory = history.incidents, history.directory
        damaged: list[tuple[Entry, str]] = []
        self.store.sweep()
        entries = self.store.entries()
        are_demoted = bool(entries) and all(one.kind == DEMOTED for one in entries)
        entry = self._named(again=are_demoted) or self.newest_readable(entries, damaged)
        if entry is None and are_demoted:
            why = f"every checkpoint in {self.store.path} was demoted, as it may contain damage"
            log.warning("%s: the run begins at step 0 again", why)
        elif entry is None and (history.has_saved or damaged):
            why = "; ".join(f"{one.path.name} {reason}" for one, reason in damaged) or "they are gone"
            what = f"no usable checkpoint in {self.store.path}: {why}. run.resume=never (resume=False) starts a new run"
            changed = [key for key in self.how.changed if key.startswith(_SHAPES)]
            raise unusable(changed[0], what) if changed else TrainError(f"cannot resume: {what}")
        manifest = entry.manifest if entry is not None else NO_MANIFEST
        step = entry.step if entry else self.parts.clock.step  # 0, or what a trainer has made by its own checkpoint
        found = incidents_of_damage(damaged, step, last.tick)
        skipped, span = None, last.stop - last.start
        has_died = last.doing is not Doing.ENDED and not endings.failure(directory, in_training=True)
        if has_died and last.doing is not Doing.BETWEEN and span > 0:
            times = history.note_process_end(last.tick, last.start, last.stop)
            skipped = (last.start, last.stop) if times >= crashes else None
        if last.tick and has_died and (skipped or last.doing is not Doing.HUNG):
            found.append(self._crash(step, skipped))
        has_changed = manifest.samples != self.parts.samples.slicing.samples
        is_resized = has_changed and manifest.each == self.samples_per_process
        return ResumePlan(
            path=entry.path if entry else None,
            tick=last.tick,
            effects=history.effects_with(manifest.effects),
            found=tuple(found),
            incidents=tuple(incidents),
            skipped=skipped,
            previous_samples_per_update=manifest.samples if is_resized else 0,
        )

    def newest_readable(self, entries: Iterable[Entry], damaged: list[tuple[Entry, str]]) -> Entry | None:
        """The first checkpoint that verifies and fits this run; those before it are added to `damaged`."""
        for entry in entries:
            if entry.kind == DEMOTED:
                continue
            try:
                self.already_read[entry.path] = self._read(entry)
            except Damaged as why:
                damaged.append((entry, str(why)))
            else:
                return entry
        return None

    def _read(self, entry: Entry) -> Saved:
        """Read a checkpoint, and check whether it belongs to this run. Raises Damaged."""
        if entry.path in self.already_read:
            return self.already_read.pop(entry.path)
        parts, manifest = self.parts, entry.manifest
        if entry.damage:
            raise Damaged(entry.damage)
        live, samples, each = parts.state.live(), parts.samples.slicing.samples, self.samples_per_process
        saved = Store.load(entry, parts.world.device, live["weights"])
        why = explain_mismatch(live, saved.parts)
        is_resized = manifest.each == each and not manifest.samples % each  # other number of processes
        if manifest.samples != samples and not is_resized:
            why = f"an update had {manifest.samples} samples, and now has {samples}"
        if why:
            raise Damaged(f"does not fit this run: {why}")
        return saved

    def load(self, entry: Entry, *, resuming: bool) -> None:
        """Load a checkpoint into the run; if `resuming`, also what does not rewind."""
        run, manifest, saved = self.parts, entry.manifest, self._read(entry)
        parts = _resharded(run.state, saved.parts)
        if resuming and any(key.startswith(("optimizer.", "schedule.")) for key in self.how.changed):
            fresh = run.state.live()  # schedules as they are configured now
            parts |= {name: fresh[name] for name in parts if name.startswith("schedule.")}
        optimizers = run.updater.optimizers
        now = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
        try:
            run.state.restore(parts)
            run.restore_checks_state(saved.memory["statistics"])
            if resuming:
                run.checks.load_persistent_state(saved.memory["panel"])
                run.updates.load_state_dict(saved.memory["passed"])
                for name, item in self.remembered.items():
                    item.load_state_dict(saved.memory["remembered"][name])
            for optimizer, *settings in zip(optimizers, self.configured, manifest.groups, now, strict=True):
                for group, new, old, current in zip(optimizer.param_groups, *settings, strict=False):
                    group.update({key: current[key] for key in new if new[key] != old.get(key)})  # changed since
                    group.pop(LR_OF_GUARD, None)
        except Exception as error:
            raise TrainError(f"{entry.path} does not have the state that this version expects: {error!r}") from error
        run.updater.accept(run.clock.step)
        run.clock.tick = max(run.clock.tick, manifest.tick)

    def _named(self, *, again: bool) -> Entry | None:
        """The checkpoint that the user named. None after the first start: a restart resumes from the newest one.
        `again`: there is none, and the run begins where it began.
        """
        source, history, store = self.how.source, self.history, self.store
        if source is None or (masked(str(source)) in history.sources and history.has_saved and not again):
            return None
        damaged: list[tuple[Entry, str]] = []
        entries = Store(source).usable() if Store(source).path.is_dir() else [Entry.of(source)]
        entry = self.newest_readable(entries, damaged)
        if entry is None:
            why = damaged[-1][1] if damaged else "there is none"
            expected = "expected auto, never, or the directory of a checkpoint or of a run"
            raise ConfigError("run.resume", str(source), f"no usable checkpoint there: {why}; {expected}")
        if entry.path.absolute().parent == store.path.absolute():
            store.demote(entry.step)
        elif store.usable():
            why = f"{store.path.parent} has checkpoints of its own: choose another run.name"
            raise ConfigError("run.resume", entry.path, why)
        history.note("taken_up_from", source=masked(str(source)))
        return entry

    def _crash(self, step: int, skipped: tuple[int, int] | None) -> dict[str, Any]:
        last = self.progress.last
        signal = Signal.HANG if last.doing is Doing.HUNG else Signal.CRASH
        evidence = fact("died", step=last.step, skipped=bool(skipped))
        return {
            "anomaly": Anomaly(signal, last.step + 1, last.tick, step, evidence),
            "remedy": "skip" if skipped else "go_on",
            "rows": self.parts.samples.rows_at(*skipped) if skipped else (),
            "rewound_to": step,
            "steps_lost": max(0, last.step - step),
        }


def incidents_of_damage(damaged: Iterable[tuple[Entry, str]], step: int, tick: int) -> list[dict[str, Any]]:
    found = [fact("damaged", name=one.path.name, why=why) for one, why in damaged]
    anomalies = [Anomaly(Signal.CHECKPOINT_DAMAGED, step + 1, tick, step, evidence) for evidence in found]
    return [{"anomaly": one, "remedy": "fall_back", "rewound_to": step} for one in anomalies]


def explain_mismatch(live: Mapping[str, Tree], saved: Mapping[str, Tree]) -> str:
    """Say in one line why a loaded state does not fit the parts of the run; empty if it does."""
    try:
        here, there = _shapes(live), _shapes(saved)
        optimizers = [name for name in live if name.startswith("optimizer.")]
        groups = [(len(live[name]["groups"]), len(saved[name]["groups"])) for name in optimizers]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return f"it does not have the structure of a state: {in_one_line(error)}"
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            return f"{name!s:.80} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
    for mine, theirs in groups:
        if theirs > mine:  # the loop may have added some since
            return f"it has {theirs} parameter groups there and {mine} here: add those before the guard is made"
    return ""


def _shapes(parts: Mapping[str, Tree]) -> dict[str, object]:
    """Describe what has to be the same, by name."""
    kinds = {name: sorted(part) if name.startswith("optimizer.") else "a part" for name, part in parts.items()}
    return kinds | {name: f"{one.dtype} {list(one.shape)}" for name, one in parts["weights"].items()}


def _resharded(state: RunState, parts: Mapping[str, Tree]) -> dict[str, Tree]:
    """Shard a loaded state, which fits, over the ranks of this run; moments are sharded like their weights."""
    like = state.live()
    for number, optimizer in enumerate(state.optimizers):
        like[f"optimizer.{number}"] = {"moments": dict(enumerate(weights_of(optimizer)))}
    return reshard(dict(parts), like)  # type: ignore[no-any-return]
