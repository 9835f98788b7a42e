"""An outbox for a run that had none: what MLflow is to show of it is put together from its directory, afterwards."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from resilient_train.record.endings import CONFIG, LOOP, SUMMARY, ended_as, is_run, last_sign_ms, loop_of, read_ending
from resilient_train.record.incident_log import INCIDENTS
from resilient_train.record.journal import plain
from resilient_train.record.outbox import ARTIFACT, BEGAN, ENDED, METRICS, OUTBOX, PARAMS, Outbox, entries
from resilient_train.record.progress import position_of

_WRITE_WITHIN_S = 30.0
_OURS = ("n", "at", "crc")  # of an entry, whatever it tells


def is_late(run_dir: Path) -> bool:
    """Say whether nobody writes an outbox while the run is at work, but we afterwards."""
    try:
        began = [one for one, _ in entries(run_dir / OUTBOX) if one is not None and one["kind"] == BEGAN]
    except OSError:
        return is_run(run_dir)
    return bool(began) and began[-1].get("late") is True  # the newest process may have written one, as it trained


def catch_up(run_dir: Path, tracking_uri: str, experiment: str) -> None:
    """Add to the outbox what it lacks of the run as it is now, unless another process is delivering it."""
    file = os.open(run_dir / OUTBOX, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as who delivers it does
        except BlockingIOError:
            return
        there = [_said(one) for one, _ in entries(run_dir / OUTBOX) if one is not None]
        place = {"tracking_uri": tracking_uri, "experiment": experiment}
        began = {"kind": BEGAN, "name": run_dir.name, **place, "late": True}
        lacks = [one for one in map(plain, [began, *_wanted(run_dir)]) if one not in there]
        if not lacks:
            return
        box = Outbox(run_dir / OUTBOX)
        for one in lacks:
            if one["kind"] == ENDED and (at := last_sign_ms(run_dir)) is not None:
                one["at"] = at
            box.put(one.pop("kind"), **one)
        if not box.close(_WRITE_WITHIN_S):
            raise OSError(f"{box.path} cannot be written")
    finally:
        os.close(file)


def _wanted(run_dir: Path) -> Iterator[dict[str, Any]]:
    """What there is to show, beside what is made of the journal."""
    if (loop := loop_of(run_dir)) is not None and loop.given:
        yield {"kind": PARAMS, "values": {key: str(value) for key, value in loop.given.items()}}
    if (summary := read_ending(run_dir, SUMMARY)) is not None and type(tick := summary.get("ticks")) is int:
        values = {"loss": summary.get("final_loss"), "step": summary.get("steps")}
        if isinstance(evaluated := summary.get("eval"), Mapping):
            values |= {f"eval/{name}": value for name, value in evaluated.items()}
        values = {name: value for name, value in values.items() if isinstance(value, int | float)}
        yield {"kind": METRICS, "tick": tick, "values": values}
    for name in (CONFIG, LOOP, INCIDENTS, "train.log"):
        if (run_dir / name).is_file():
            yield {"kind": ARTIFACT, "path": name, "bytes": (run_dir / name).stat().st_size}
    if (status := ended_as(run_dir)) is not None and (stand := position_of(run_dir)) is not None:
        yield {"kind": ENDED, "status": status, "tick": stand.tick}


def _said(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in _OURS}
