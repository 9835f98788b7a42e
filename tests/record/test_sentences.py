"""No sentence is data: with the words of all of them in another order, runs decide what they decide else."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command import MINE
from fork_server import Forked, python
from test_killed_anywhere import train

from resilient_train.durable.journal import JOURNAL, Journal, read
from resilient_train.ground import sentences

GIVES_UP = ["drill=inf_loss", "drill.at=[20,21,22,23,24,25]", "recovery.budget.in_a_row=3"]
OF_SUMMARY = ("status", "exit_code", "steps", "ticks", "trial_updates", "verdict", "final_loss", "weights_sha256")


def killed(entries: int) -> None:
    """Train to the entry of the journal with this number."""
    write = Journal.write

    def writing(journal: Journal, kind: str, /, **fields: Any) -> None:
        write(journal, kind, **fields)
        if len(journal.entries) == entries:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.write = writing  # type: ignore[method-assign]
    train(Path("run"))


# Each is started so often, one start after the other.
RUNS: dict[str, list[Callable[[], None]]] = {
    "ten faults": [partial(train, Path("run"))],
    "killed and resumed": [partial(killed, 40), partial(train, Path("run"))],
    "gives up": [partial(python, "-m", "resilient_train", *MINE, *GIVES_UP, "run.dir=run", "run.steps=60")] * 2,
}


def with_words_shuffled(what: Callable[[], None]) -> None:
    """Do it with the words of each template in another order; fields and optional parts stay whole."""
    dice = random.Random(0)

    def shuffled(text: Any) -> Any:
        if isinstance(text, tuple):
            return tuple(map(shuffled, text))
        parts = re.findall(r"<[^<>]*>|\{[^{}]*\}|[^\s<>{}]+", text)
        return " ".join(dice.sample(parts, len(parts)))

    for name, value in [*vars(sentences).items()]:
        if isinstance(value, dict) and name.isupper():
            value.update({key: shuffled(text) for key, text in value.items()})
        elif isinstance(value, str) and name.isupper():
            for other in [one for one in sys.modules.values() if getattr(one, name, None) is value]:
                setattr(other, name, shuffled(value))
    what()


def facts_of(place: Path) -> Iterator[Any]:
    """Everything that runs have written as data; what a clock says is left out."""
    for journal in sorted(place.rglob(JOURNAL)):
        for entry in read(journal):
            entry["incident"] = {**(entry.get("incident") or {}), "seconds": None, "at": None}
            yield [entry["n"], entry["kind"], {name: one for name, one in entry.items() if name not in ("at", "crc")}]
        if (file := journal.with_name("summary.json")).exists():  # a loop of the caller's may have none
            yield {name: json.loads(file.read_text()).get(name) for name in OF_SUMMARY}
        if (file := journal.with_name("quarantine.json")).exists():
            yield [[row["row"], row["step"], row["incident"]] for row in json.loads(file.read_text())["rows"]]


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_says_decides_nothing(name: str, tmp_path: Path) -> None:
    """Nothing parses or compares a sentence: all facts are the same where each says something else."""
    facts, said, codes = [], [], []
    for folder in ("said", "shuffled"):
        (place := tmp_path / folder).mkdir()
        for start in RUNS[name]:
            start = partial(with_words_shuffled, start) if folder == "shuffled" else start
            codes.append(Forked(start, place=place, out=place / "out.txt").wait())
        facts.append([json.dumps(one, sort_keys=True).replace(str(place), "") for one in facts_of(place)])
        said.append("".join(file.read_text() for file in sorted(place.rglob("incidents.jsonl"))))
    assert codes[: len(codes) // 2] == codes[len(codes) // 2 :]
    assert facts[0] == facts[1]
    assert any("incident_opened" in one for one in facts[0])
    assert said[0] != said[1], "the words were shuffled"
