"""Shows a run in TensorBoard: the numbers of its updates, and a text for each incident."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resilient_train.extensions import Extension, Sink
from resilient_train.ground.errors import unusable
from resilient_train.parts.run import Run


class TensorBoardWriter(Sink):
    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise unusable("tensorboard", "needs the package tensorboard: pip install tensorboard") from error
        self._writer = SummaryWriter(directory, flush_secs=10)  # by a thread of its own

    def write(self, event: Mapping[str, Any]) -> None:
        write: Any = self._writer
        match event:
            case {"kind": "metrics", "tick": tick, "values": values}:
                for name, value in values.items():
                    write.add_scalar(name, value, tick)
            case {"kind": "incident_opened" | "incident_closed" as kind, "incident": incident}:
                lines = [f"{name}: {incident[name]}" for name in _SHOWN if incident.get(name) not in (None, [], "")]
                write.add_text(f"incident {incident['id']} {kind[9:]}", "\n\n".join(lines), incident["tick"])

    def close(self) -> None:
        self._writer.close()


_SHOWN = ["signal", "cause", "culprit", "rows", "advice", "actions", "rewound_to", "steps_lost", "outcome"]


class TensorBoard(Extension):
    """`tensorboard=true` by command; `Guard(..., extensions=[TensorBoard(directory)])` in a loop."""

    node = "tensorboard"

    def __init__(self, directory: str | Path | None = None, *, in_run_directory: bool = False) -> None:
        self._directory, self._in_run_directory = directory, in_run_directory

    @classmethod
    def configured(cls, node: Any, steps: int) -> TensorBoard:
        return cls(in_run_directory=bool(node))

    def build(self, run: Run) -> None:
        home = run.incident_log.directory
        place = home / "tensorboard" if self._in_run_directory and home is not None else self._directory
        if place is not None and run.world.is_main:
            run.sinks.append(TensorBoardWriter(Path(place)))
