"""Faults on purpose, as the journal has them: who reviews a run should know what was meant to happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resilient_train.record.incidents import FIRED
from resilient_train.record.journal import Entry


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault of a drill that struck."""

    fault: str
    tick: int  # 0: it is in the data, from the first sample to the last


def strikes(entries: Iterable[Entry]) -> tuple[Strike, ...]:
    """Return what struck in a run so far, in the order in which it did; of what is damaged, nothing."""
    fired = [(entry.get("name"), entry.get("tick")) for entry in entries if entry["kind"] == FIRED]
    return tuple(Strike(name, tick) for name, tick in fired if isinstance(name, str) and type(tick) is int)


def on_purpose(struck: Sequence[Strike]) -> str:
    """Say that there was a drill, in a sentence behind another; nothing where there was none."""
    times = Counter(one.fault for one in struck)
    told = [fault if count == 1 else f"{fault} {count:,} times" for fault, count in times.items()]
    return f" This run has a drill: faults on purpose ({', '.join(told)})." if told else ""


def struck_at(struck: Iterable[Strike], tick: int) -> str:
    """Name what struck in this very attempt; what a fault does to later ones is not known, and not guessed."""
    return ", ".join(dict.fromkeys(one.fault for one in struck if one.tick == tick))
