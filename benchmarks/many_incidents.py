"""What the last of very many incidents costs, next to the first ones.

One row in eight is NaN, so about every second update has one. The command trains on them with a real MLflow store, and
its own process uploads while it lasts. Every 100 updates the objective notes the clocks and the memory of the process
that trains. Ends with 1 where a limit is broken: the size of the journal, the memory of the process that uploads, the
growth of the cost of an incident.

    python benchmarks/many_incidents.py                       10,000 bad rows, some in one incident: 6 minutes
    python benchmarks/many_incidents.py --incidents 1000
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
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST_JOURNAL_MB, MOST_UPLOADER_MB, MOST_GROWTH = 50.0, 400.0, 1.25
EVERY = 100  # updates between two notes

PROGRAM = """
import json, resource, time
import torch

BATCH, EVERY = 4, {every}
file, calls = open("clocks.jsonl", "a", buffering=1), 0


def net():
    return torch.nn.Linear(8, 1)


def rows(bad):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * bad, 8, generator=generator)
    y = x.sum(1, keepdim=True)
    x[torch.randperm(len(x), generator=generator)[:bad], 3] = float("nan")
    return torch.utils.data.TensorDataset(x, y)


def loss(model, batch):
    global calls
    if model.training and torch.is_grad_enabled():
        if calls % EVERY == 0:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(json.dumps([time.thread_time(), time.perf_counter(), memory]), file=file)
        calls += 1
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def train(place: Path, incidents: int, drain_s: float) -> dict[str, Any]:
    """Train on so many bad rows, and return what it cost."""
    (place / "many.py").write_text(PROGRAM.replace("{every}", str(EVERY)))
    command = [sys.executable, "-m", "resilient_train", "model=custom", "model._target_=many.net", "run.name=many"]
    command += ["data=custom", "data.train._target_=many.rows", f"+data.train.bad={incidents}", "data.batch_size=4"]
    command += ["objective=custom", "objective._target_=many.loss", "optimizer.lr=1e-4", "schedule=constant"]
    command += ["recovery.budget.rows=1000000", "recovery.budget.share=0.5", "recovery.budget.refused=1000000"]
    command += [
        f"run.steps={2 * incidents}",
        "run.log_every=100",
        f"tracking.drain_s={drain_s}",
        "run.deterministic=false",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{place}", "OMP_NUM_THREADS": "1"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    highest = [0.0]
    with (place / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=output, stderr=output)
        threading.Thread(target=_watch_uploader, args=[process.pid, highest], daemon=True).start()
        code = process.wait()
    if code:
        sys.exit(f"{(place / 'output.txt').read_text()[-3000:]}\nended with {code}")
    return {**costs(place), "uploader_mb": round(highest[0], 1)}


def costs(place: Path) -> dict[str, Any]:
    """Read what the run has left."""
    run_dir = place / "runs" / "many"
    entries = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    notes = [json.loads(line) for line in (place / "clocks.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    known = json.loads((run_dir / "mlflow.json").read_text())
    ticks = sorted(one["tick"] for one in found)
    tenth = max(1, len(notes) // 10)
    blocks = list(pairwise(notes))
    cpu, wall = ([1e3 * (after[at] - before[at]) / EVERY for before, after in blocks] for at in (0, 1))
    return {
        "incidents": len(found),
        "recovered": sum(one["outcome"] == "recovered" for one in found),
        "last_tick": ticks[-1],
        "journal_mb": round((run_dir / "journal.jsonl").stat().st_size / 1e6, 2),
        "entries_an_incident": round(len(entries) / len(found), 2),
        "directory_mb": round(sum(one.stat().st_size for one in run_dir.rglob("*") if one.is_file()) / 1e6, 1),
        "cpu_ms": [round(statistics.median(some), 3) for some in (cpu[:tenth], cpu[-tenth:])],
        "wall_ms": [round(statistics.median(some), 3) for some in (wall[:tenth], wall[-tenth:])],
        "trainer_mb": [round(notes[at][2] / 1e3, 1) for at in (tenth, -1)],
        "mlflow": known.get("run_id"),
    }


def uploaded(place: Path, run_id: str) -> dict[str, Any]:
    """Count what MLflow has of the run."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place}/runs/mlflow.db")
    experiment, traces, token = client.get_run(run_id).info.experiment_id, 0, None
    while True:
        page = client.search_traces(
            locations=[experiment], run_id=run_id, max_results=500, page_token=token, include_spans=False
        )
        traces, token = traces + len(page), page.token
        if not token:
            break
    pictures = len(client.list_artifacts(run_id, "incidents"))
    note = client.get_run(run_id).data.tags["mlflow.note.content"]
    return {"traces": traces, "pictures": pictures, "note": note.splitlines()[0]}


def _watch_uploader(trainer: int, highest: list[float]) -> None:
    while Path(f"/proc/{trainer}").exists():
        for children in Path(f"/proc/{trainer}/task").glob("*/children"):
            try:
                pids = children.read_text().split()
            except OSError:
                continue
            for pid in pids:
                try:
                    if b"sync" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                        continue
                    status = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
                highest[0] = max([highest[0], *(int(one) / 1e3 for one in found)])
        time.sleep(0.5)


def main() -> None:
    """Measure, print, and end with 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description="The cost of very many incidents.")
    parser.add_argument("--incidents", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--drain", type=float, default=7200.0, help="seconds for the uploads (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="train there, and leave it to be looked at")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="many-") as scratch:
        place = given.keep or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        figures = train(place.absolute(), given.incidents, given.drain)
        figures["seconds"] = round(time.monotonic() - began)
        figures |= uploaded(place.absolute(), figures.pop("mlflow"))
    print(json.dumps(figures, indent=2))
    first, last = figures["cpu_ms"]
    broken = [
        name
        for name, is_broken in {
            "journal": figures["journal_mb"] >= MOST_JOURNAL_MB,
            "uploader": figures["uploader_mb"] >= MOST_UPLOADER_MB,
            "growth": last > MOST_GROWTH * first,
            "traces": given.drain > 60 and figures["traces"] != figures["incidents"],
        }.items()
        if is_broken
    ]
    if broken:
        sys.exit(f"beyond its limit: {', '.join(broken)}")


if __name__ == "__main__":
    main()
