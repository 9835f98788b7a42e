"""How long a resume over an iterable data set takes until its first update, by the rows that were read before.

A loop of plain PyTorch trains through most of an epoch, and another process resumes it. The data set can return its
state, so a resume need not read the rows again; with `--unproven` its checkpoint lacks the proof that this state leads
to the same rows, as those of earlier versions do, and the epoch is read again.

    python benchmarks/resume_stream.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from resilient_train import Guard
from resilient_train.data.sequential import IterableSamples

BATCH = 100


class Rows:
    """An iterable data set that says where it stands, and counts what is read."""

    def __init__(self, rows: int) -> None:
        self.rows, self.at, self.reads = rows, 0, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.at < self.rows:
            self.at += 1
            self.reads += 1
            x = torch.full((8,), float(self.at % 97) / 97)
            yield x, x.sum()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch."""
    x, y = batch
    return functional.mse_loss(model(x).squeeze(1), y)


def train(rows: int, run_dir: Path, stop: int, *, unproven: bool) -> None:
    """Train to the update `stop`, resuming what is there; print the rows and seconds until the first update."""
    if unproven:
        IterableSamples._is_proven = lambda self, proof: False  # type: ignore[method-assign]
    torch.manual_seed(0)
    model, data = nn.Linear(8, 1), Rows(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began, first = time.perf_counter(), 0.0
    guard = Guard(
        None,
        model,
        optimizer,
        data=data,
        objective=loss_of,
        batch_size=BATCH,
        steps=rows // BATCH,
        run_dir=run_dir,
        disk=50,
        resume=True,
    )
    for batch in guard.batches(stop - guard.clock.step):
        guard.step(batch)
        first = first or time.perf_counter() - began
        if first and guard.clock.step <= 1:
            first = 0.0
    print(f"rows {data.reads} seconds {first:.3f}")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="Measure a resume over an iterable data set.")
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 200_000], help="in an epoch")
    parser.add_argument("--unproven", action="store_true", help="as with checkpoints of earlier versions")
    parser.add_argument("--child", nargs=3, metavar=("ROWS", "DIR", "STOP"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        train(int(given.child[0]), Path(given.child[1]), int(given.child[2]), unproven=given.unproven)
        return
    print(f"{'rows in an epoch':>18} {'read before':>12} {'read by the resume':>19} {'seconds':>8}")
    for rows in given.rows:
        with TemporaryDirectory(prefix="resume-stream-") as scratch:
            most = int(0.9 * rows / BATCH)
            printed = ""
            for stop in (most, most + 1):
                child = [sys.executable, __file__, "--child", str(rows), f"{scratch}/run", str(stop)]
                child += ["--unproven"] if given.unproven else []
                printed = subprocess.run(child, check=True, capture_output=True, text=True).stdout
            reads, seconds = printed.split()[-3], printed.split()[-1]
            print(f"{rows:>18,} {most * BATCH:>12,} {int(reads):>19,} {seconds:>8}", flush=True)


if __name__ == "__main__":
    main()
