"""What tracking costs the training thread, and how much a sender of 100,000 rows and 200 incidents needs.

A loop of small matrix products notes eight numbers at every step, which is ten times as often as by default, while the
server is well, dead, hangs, or fails, or the disk below the run directory is full (only root may mount a small one).
What the calls take is timed inside the loop, the longest call and the longest step apart; steps of a loop that tracks
nothing are what they are held against. Ends with 1 where a limit is broken.

    python benchmarks/tracking.py
    python benchmarks/tracking.py --rows 100000 --incidents 200      (a long run, uploaded as a whole)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from interleaved import begin, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from moody import Door, mlflow_server

from resilient_train.tracking.tracker import Tracker, TrackingConfig, build

MOST_MS_A_STEP, MOST_STALL_MS = 0.3, 50.0
OF_SERVER = ("pass", "dead", "hang", "fail")
MOODS = ("none", "sqlite", *OF_SERVER, "full")


@dataclass
class Cost:
    """What a loop of steps told about itself."""

    mood: str
    step_ms: float  # median
    longest_step_ms: float
    call_ms: float  # mean of what tracking took of a step
    longest_call_ms: float
    end_s: float


def train(mood: str, address: str | None, place: Path, steps: int, pipe: Connection) -> None:
    """Train a little, in a process of its own."""
    torch.set_num_threads(1)
    weight = torch.randn(256, 256)
    tracker: Tracker = Tracker()
    if mood != "none":
        run_dir = place / mood / f"run-{time.monotonic_ns()}"
        run_dir.mkdir(parents=True)
        tracker = build(TrackingConfig("mlflow", address, "cost", 5.0), run_dir, place)
    tracker.begin()
    calls, laps = [], []
    values = {f"metric.{index}": 0.5 for index in range(8)}
    for tick in range(steps):
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(weight, weight)
        asked = time.perf_counter()
        tracker.metrics(tick, values)
        now = time.perf_counter()
        calls.append(now - asked)
        laps.append(now - began)
    ending = time.perf_counter()
    tracker.finish("completed")
    pipe.send(
        Cost(
            mood,
            1e3 * statistics.median(laps),
            1e3 * max(laps),
            1e3 * statistics.mean(calls),
            1e3 * max(calls),
            time.perf_counter() - ending,
        )
    )


def costs(moods: list[str], steps: int, rounds: int) -> list[list[Cost]]:
    """Run each kind of loop in turn, `rounds` times."""
    found: dict[str, list[Cost]] = {mood: [] for mood in moods}
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="tracking-")))
        door = None
        if "full" in moods:
            stack.enter_context(small_disk(place / "full"))
        if {*OF_SERVER} & set(moods):
            door = Door(stack.enter_context(mlflow_server(place)))
            stack.callback(door.close)
        for _ in range(rounds):
            for mood in moods:
                if door is not None:
                    door.mood = mood if mood in OF_SERVER else "pass"  # type: ignore[assignment]
                address = door.address if door is not None and mood in OF_SERVER else None
                found[mood].append(in_child(train, mood, address, place, steps))
    return list(found.values())


@contextmanager
def small_disk(where: Path) -> Iterator[None]:
    """A disk that the first seconds of a run fill up."""
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", where], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", where], check=False)


def in_child(target: Callable[..., None], *args: Any) -> Any:
    """Run it in a fresh process and return what that sends."""
    context = get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=target, args=[*args, its])
    process.start()
    its.close()
    answer = mine.recv()
    process.join()
    return answer


def long_run(rows: int, incidents: int, keep: Path | None) -> dict[str, Any]:
    """Leave what a long run leaves, and upload it as its own process would; watch that process's memory."""
    from test_delivery import client_of, prove, trained

    from resilient_train.tracking.connection import UploadCursor

    with ExitStack() as stack:
        place = keep or Path(stack.enter_context(TemporaryDirectory(prefix="tracking-")))
        place.mkdir(parents=True, exist_ok=True)
        address = stack.enter_context(mlflow_server(place))
        run_dir = trained(place / "long", address, "long", range(rows), incidents)
        tracker: Any = build(TrackingConfig("mlflow", address, "long", 3600.0), run_dir, place)
        highest: list[int] = [0]
        began = time.monotonic()
        tracker.begin()
        threading.Thread(target=_watch_memory, args=[tracker, highest], daemon=True).start()
        tracker.finish("completed")
        seconds = time.monotonic() - began
        prove(run_dir, address, "long")
        run_id = UploadCursor(run_dir).get("run_id")
        note = client_of(address).get_run(run_id).data.tags["mlflow.note.content"]
    return {
        "rows": rows,
        "incidents": incidents,
        "seconds": round(seconds, 1),
        "memory_mib": highest[0] // 1024,
        "note_characters": len(note),
    }


def _watch_memory(tracker: Any, highest: list[int]) -> None:
    while True:
        process = tracker.uploader.process
        try:
            status = Path(f"/proc/{process.pid}/status").read_text() if process else ""
        except OSError:
            return
        found = [line for line in status.splitlines() if line.startswith("VmHWM")]
        if found:
            highest[0] = max(highest[0], int(found[0].split()[1]))
        time.sleep(0.5)


def main() -> None:
    """Measure, print, and end with 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description="The cost of tracking.")
    parser.add_argument("--moods", nargs="+", choices=MOODS, default=list(MOODS if os.geteuid() == 0 else MOODS[:-1]))
    parser.add_argument("--steps", type=int, default=3000, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, help="upload a run of so many rows instead")
    parser.add_argument("--incidents", type=int, default=200, help="of that run (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="of that run, and of the server's store, to look at")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin()
    if given.rows:
        figures: Any = long_run(given.rows, given.incidents, given.keep)
        print(json.dumps(figures))
        broken = figures["note_characters"] >= 8000
    else:
        found = costs(given.moods, given.steps, given.rounds)
        title = ["server", "step ms", "longest step ms", "calls ms a step", "longest call ms", "end s"]
        rows = [
            [rounds[0].mood] + [f"{statistics.median(getattr(one, name) for one in rounds):.3f}" for name in _NAMES]
            for rounds in found
        ]
        print(table(title, rows))
        figures = [[asdict(one) for one in rounds] for rounds in found]
        all_of = [one for rounds in found for one in rounds if one.mood != "none"]
        broken = any(one.call_ms > MOST_MS_A_STEP or one.longest_call_ms > MOST_STALL_MS for one in all_of)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2))
    sys.exit(int(broken))


_NAMES = ("step_ms", "longest_step_ms", "call_ms", "longest_call_ms", "end_s")

if __name__ == "__main__":
    main()
