"""A run in TensorBoard: the numbers of its updates as curves, and a text for each incident.

    guard = Guard(..., run_dir="runs/mine", extensions=[TensorBoard("runs/mine/tensorboard")])

Copy this file next to your program; it needs the package tensorboard. In a package of your own the class is an entry
point, and then works with the command and with trainers, too (docs/extend.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from resilient_train.extensions import Extension, Sink

SHOWN = ["signal", "cause", "culprit", "rows", "advice", "actions", "rewound_to", "steps_lost", "outcome"]


class Writer(Sink):
    def __init__(self, directory: str | Path) -> None:
        self.writer: Any = SummaryWriter(directory, flush_secs=10)  # by a thread of its own

    def write(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"kind": "metrics", "tick": tick, "values": values}:
                for name, value in values.items():
                    self.writer.add_scalar(name, value, tick)
            case {"kind": "incident_opened" | "incident_closed" as kind, "incident": incident}:
                lines = [f"{name}: {incident[name]}" for name in SHOWN if incident.get(name) not in (None, [], "")]
                self.writer.add_text(f"incident {incident['id']} {kind[9:]}", "\n\n".join(lines), incident["tick"])

    def close(self) -> None:
        self.writer.close()


class TensorBoard(Extension):
    def __init__(self, directory: str | Path) -> None:
        self.directory = directory

    def build(self, run: Any) -> None:
        if run.world.is_main:
            run.sinks.append(Writer(self.directory))
