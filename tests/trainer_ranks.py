"""Trainers of other libraries on two ranks: one start of torch's elastic agent trains several of them in turn."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fork_server import Forked, torchrun

LIMIT_S = 300.0
MORE: dict[str, dict[str, Any]] = {
    "hugging_face": {},
    "lightning": {"strategy": "ddp", "devices": 2, "steps": 80},
}


def on_two_ranks(place: Path, *names: str) -> tuple[int | None, str]:
    """Train what has these names, LIBRARY+HOW+FAULT, in `place`: the agent's exit code, and what all have said."""
    said = place / "said.txt"
    agent = Forked(_agent, str(place), *names, out=said)
    try:
        return agent.ended(LIMIT_S), said.read_text()
    finally:
        agent.kill()


def _agent(*words: str) -> None:
    """Fork ranks that have what this imports: transformers alone takes seconds."""
    import test_trainers  # noqa: F401

    torchrun("trainer_ranks", "--standalone", "--nproc_per_node=2", __file__, *words)


if __name__ == "__main__":
    from test_trainers import TRAINERS

    place = Path(sys.argv[1])
    for name in sys.argv[2:]:
        library, how, fault = name.split("+")
        more = MORE[library] | ({"steps": 128} if fault == "hot" else {})
        ended = TRAINERS[library](place / name, fault, guarded=how != "plain", recovery=how, **more)
        (place / f"{name}-{os.environ['RANK']}").write_text(ended.weights)
