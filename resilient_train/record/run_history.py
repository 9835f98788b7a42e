"""What earlier processes of a run noted in its journal, apart from incidents: remedies, checkpoints, drills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from resilient_train.record.journal import JOURNAL, Entry, Journal, read
from resilient_train.types import Anomaly, Cause, Diagnosis, Incident, Outcome, Signal

_LEAVE_DAMAGE = {"loss_spike", "hot_lr", "bit_flip", "bad_moments"}  # drills whose damage may be noticed later
_NOTICED_WITHIN = 400  # ticks; damage to a weight that nothing depends on is never noticed
_END_PROCESS = {"crash": Signal.CRASH, "hang": Signal.HANG}
_BY_ROWS = {Cause.DATA, Cause.EXPLOSION, Cause.OVERFLOW, Cause.UNKNOWN}


class RunHistory:
    """Reads these entries, and adds to them. Without a journal they last as long as the process."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self.remedies: Mapping[str, Any] | None = None  # that were active last
        self.has_saved = False  # a checkpoint was ever committed
        self.sources: set[str] = set()  # paths that the user told the run to resume from
        self.began_with: tuple[int, int] | None = None  # processes, and samples of an update
        self.data_sample: Mapping[str, Any] | None = None  # rows of the data set, to notice that it changed
        self._fired: list[FiredDrill] = []
        # By tick, which no two processes end at: the samples in use when one ended, and whether in its first update.
        self._endings: dict[int, tuple[int, int, bool]] = {}
        for entry in journal.entries if journal else []:
            self.recall(entry)

    def note(self, kind: str, /, **fields: Any) -> None:
        """Note one of the kinds that `recall` knows."""
        self.recall({"kind": kind, **fields})
        if self._journal is not None:
            self._journal.write(kind, **fields)

    def note_process_end(self, tick: int, start: int, stop: int, *, in_first: bool) -> int:
        """Note which samples were in use when a process ended; return how many processes in a row ended at these.

        Return 0 if each of them was `in_first`, the first update after a start: compiling takes long.
        """
        self.note("process_ended", tick=tick, start=start, stop=stop, in_first=in_first)
        same = list(takewhile(lambda one: one[:2] == (start, stop), reversed(self._endings.values())))
        return 0 if all(one[2] for one in same) else len(same)

    def note_drill_fired(self, number: int, name: str, tick: int, **details: Any) -> None:
        """Note that a drill is about to fire. Before it does: a crash would fire again after every restart."""
        self.note("drill_fired", drill=number, name=name, tick=tick, **details)

    def has_fired(self, number: int) -> bool:
        return any(one.number == number for one in self._fired)

    def drill_behind(self, anomaly: Anomaly, diagnosis: Diagnosis, earlier: Sequence[Incident]) -> str:
        """Name the faults that caused an incident, directly or by the damage they left; empty if none did."""
        found = [one for one in self._fired if _fired_here(one, anomaly, diagnosis)]
        if not found and not diagnosis.rows:
            found = [one for one in self._fired if one.tick and _left_damage(one, anomaly, diagnosis, earlier)][-1:]
        if not found and not diagnosis.rows and diagnosis.culprit is None and diagnosis.cause in _BY_ROWS:
            found = [one for one in self._fired if not one.tick]
        return ", ".join(dict.fromkeys(one.fault for one in found))

    def recall(self, entry: Entry) -> None:
        match entry:
            case {"kind": "remedies_in_force", "remedies": dict(remedies)}:  # of rows and samples, those that are new
                self.remedies = _with_earlier(remedies, self.remedies)
            case {"kind": "checkpoint_saved"}:
                self.has_saved = True
            case {"kind": "process_ended", "tick": int(tick), "start": int(start), "stop": int(stop)}:
                self._endings[tick] = (start, stop, entry.get("in_first") is True)
            case {"kind": "began", "processes": int(processes), "samples": int(samples)}:  # with how many of each
                self.began_with = (processes, samples)
            case {"kind": "data_seen", "sample": dict(sample)}:
                self.data_sample = sample
            case {"kind": "taken_up_from", "source": str(source)}:
                self.sources.add(source)
            case {"kind": "drill_fired", "drill": int(number), "name": str(fault), "tick": int(tick)}:
                rows = None if entry.get("rows") is None else frozenset(entry["rows"])
                self._fired.append(FiredDrill(number, fault, tick, entry.get("until", tick), rows))


def history_of(run_dir: Path) -> RunHistory:
    """Read what a run has noted; nothing of a journal that cannot be read."""
    history = RunHistory(None)
    with suppress(OSError):
        for entry in read(run_dir / JOURNAL):
            history.recall(entry)
    return history


def _with_earlier(remedies: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the rows and samples of `earlier` entries to an entry about remedies, which has only those that are new."""
    whole = dict(remedies)
    for key in ("skipped", "quarantined"):
        if isinstance(new := whole.get(key), list) and whole.get("is_whole") is not True:
            known = (earlier or {}).get(key)
            whole[key] = known if isinstance(known, list) else []
            whole[key] += new  # in place: copying it each time would take longer with each incident
    return whole


# -------------------------------------------------------------------------------------------------------------- drills


@dataclass(frozen=True, slots=True)
class FiredDrill:
    number: int
    fault: str
    tick: int  # 0: it is in the data, from the first sample to the last
    until: int  # the last tick at which it was injected
    rows: frozenset[int] | None = None  # None: not known


def _fired_here(one: FiredDrill, anomaly: Anomaly, diagnosis: Diagnosis) -> bool:
    """Say whether a fault was injected in this very update, or into these rows."""
    if one.fault in _END_PROCESS:
        return anomaly.signal is _END_PROCESS[one.fault] and abs(anomaly.tick - one.tick) <= 1
    if diagnosis.cause is Cause.PROCESS:
        return False
    if not one.tick:
        return bool(diagnosis.rows) and (one.rows is None or one.rows.issuperset(diagnosis.rows))
    return one.tick <= anomaly.tick <= one.until


def _left_damage(one: FiredDrill, anomaly: Anomaly, diagnosis: Diagnosis, earlier: Sequence[Incident]) -> bool:
    """Say whether an anomaly may come from damage that a fault left: noticed late, or not repaired since."""
    if one.fault not in _LEAVE_DAMAGE or anomaly.tick < one.tick:
        return False
    if diagnosis.cause is Cause.PROCESS and anomaly.signal is not Signal.RANK_MISMATCH:  # it was on one rank alone
        return False
    seen = [past for past in earlier if past.anomaly.tick >= one.tick and one.fault in past.drill.split(", ")]
    if seen:
        return seen[-1].anomaly.reached_weights and seen[-1].outcome is not Outcome.RECOVERED
    return anomaly.tick <= one.until + _NOTICED_WITHIN
