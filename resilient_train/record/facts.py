"""What a run has to know of its earlier processes, besides the incidents: each is an entry of the journal."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from resilient_train.record.drills import FIRED, Strike, strikes
from resilient_train.record.journal import Entry, Journal
from resilient_train.secrets import masked

IN_FORCE = "remedies_in_force"
_RESUMED_FROM = "taken_up_from"
_BEGAN, _PARTS_OF_UPDATE, _MOST = "began", ("processes", "samples"), 2**40
_DATA = "data_seen"
_SAVED, _ENDED = "checkpoint_saved", "process_ended"


class Facts:
    """Reads them from the journal, and adds to it; without a journal they last as long as the process."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self.remedies: Mapping[str, Any] | None = None  # in force
        self.has_saved = False  # a checkpoint, ever
        self.sources: set[str] = set()  # named places that the run was resumed from
        self.began_with: tuple[int, int] | None = None  # processes, and samples of an update
        self.data: Mapping[str, Any] | None = None  # a sample of the data set, to recognise it by
        self.struck: list[Strike] = []  # by drills
        self._fired: set[int] = set()
        self._about_drills: dict[int, Mapping[str, Any]] = {}
        self._endings: list[tuple[int, int, bool]] = []  # samples at work when processes ended, in their first update
        for entry in journal.entries if journal else []:
            self._recall(entry)

    def in_force(self, remedies: Mapping[str, Any]) -> None:
        """Note what remedies are in force from now on."""
        self.remedies = remedies
        self._write(IN_FORCE, remedies=remedies)

    def saved(self, step: int, tick: int) -> None:
        """Note that a checkpoint was committed."""
        self.has_saved = True
        self._write(_SAVED, step=step, tick=tick)

    def process_ended(self, tick: int, start: int, stop: int, *, in_first: bool) -> int:
        """Note which samples were at work when the process ended; return how often in a row it was these.

        That is 0 as long as it was `in_first`, the first update after a start, each time: to compile takes long, and
        processes are killed meanwhile whatever the samples.
        """
        self._endings = [*self._endings, (start, stop, in_first)]
        self._write(_ENDED, tick=tick, start=start, stop=stop, in_first=in_first)
        same = list(takewhile(lambda one: one[:2] == (start, stop), reversed(self._endings)))
        return 0 if all(one[2] for one in same) else len(same)

    def began(self, processes: int, samples: int) -> None:
        """Note what an update is made of: that stays if the run is resumed with more or fewer processes."""
        self.began_with = (processes, samples)
        self._write(_BEGAN, processes=processes, samples=samples)

    def saw_data(self, sample: Mapping[str, Any]) -> None:
        """Note a sample of the data set, for a process that resumes."""
        self.data = sample
        self._write(_DATA, sample=sample)

    def resumed_from(self, source: str) -> None:
        """Note that the run was resumed from a place that was named."""
        self.sources.add(masked(source))
        self._write(_RESUMED_FROM, source=source)

    def about_drill(self, number: int, more: Mapping[str, Any]) -> None:
        """Take what is to be noted of a drill that is about to fire."""
        self._about_drills[number] = more

    def fired(self, number: int, name: str, tick: int) -> None:
        """Note that a drill is about to fire: before it does, or a crash would fire again after every restart."""
        entry = {"drill": number, "name": name, "tick": tick, **self._about_drills.pop(number, {})}
        self._fired.add(number)
        self.struck += strikes([{"kind": FIRED, **entry}])
        self._write(FIRED, **entry)

    def has_fired(self, number: int) -> bool:
        """Say whether a drill fired already, in this process or an earlier one."""
        return number in self._fired

    def _write(self, kind: str, **fields: Any) -> None:
        if self._journal is not None:
            self._journal.write(kind, **fields)

    def _recall(self, entry: Entry) -> None:
        kind = entry["kind"]
        if kind == IN_FORCE and isinstance(entry.get("remedies"), dict):
            self.remedies = entry["remedies"]
        elif kind == _BEGAN and all(
            type(entry.get(key)) is int and 0 < entry[key] <= _MOST for key in _PARTS_OF_UPDATE
        ):
            self.began_with = (entry["processes"], entry["samples"])
        elif kind == _DATA and _is_sample(entry.get("sample")):
            self.data = entry["sample"]
        elif kind == _RESUMED_FROM and isinstance(entry.get("source"), str):
            self.sources.add(entry["source"])
        elif kind == _SAVED:
            self.has_saved = True
        elif kind == _ENDED and type(entry.get("start")) is int and type(entry.get("stop")) is int:
            self._endings.append((entry["start"], entry["stop"], entry.get("in_first") is True))
        elif kind == FIRED and type(entry.get("drill")) is int:
            self._fired.add(entry["drill"])
            self.struck += strikes([entry])


def _is_sample(node: Any) -> bool:
    if not isinstance(node, dict) or type(node.get("rows")) is not int or not isinstance(node.get("digests"), dict):
        return False
    digests = node["digests"]
    return all(row.isdecimal() and (one is None or isinstance(one, str)) for row, one in digests.items())
