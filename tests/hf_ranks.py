"""Trainers of transformers on two ranks: one start of torch's elastic agent trains several of them in turn."""

from __future__ import annotations

import sys
from pathlib import Path

import hf_programs as programs
from fork_server import Forked, torchrun

import resilient_train
from resilient_train.data.trees import sha256

LIMIT_S = 300.0


def on_two_ranks(place: Path, *names: str) -> tuple[int | None, str]:
    """Train what has these names, as HOW+FAULT or FAULT, in `place`: the agent's exit code, and what all have said."""
    said = place / "said.txt"
    agent = Forked(_agent, str(place), *names, out=said)
    try:
        return agent.ended(LIMIT_S), said.read_text()
    finally:
        agent.kill()


def _agent(*words: str) -> None:
    """Fork ranks that have what this module imports: transformers alone takes seconds."""
    torchrun("hf_ranks", "--standalone", "--nproc_per_node=2", __file__, *words)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        how, _, fault = name.rpartition("+")
        made = programs.trainer("llama", Path(sys.argv[1]) / name, fault, logging_nan_inf_filter=False)
        if how != "plain":
            resilient_train.hf.guard(made, recovery=how or "balanced")
        made.train()
        digest = sha256(dict(made.model.named_parameters()))
        (Path(sys.argv[1]) / f"{name}-{made.args.process_index}").write_text(digest)
