"""The journal survives kills, damage and full disks; the incidents in it are recalled, listed and told in words."""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stories import free_text

from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.journal import Journal, plain, read
from resilient_train.durable.run_history import from_tree, in_words
from resilient_train.ground.errors import TrainError
from resilient_train.ground.types import Action, Anomaly, Cause, Culprit, Decision, Diagnosis, Incident, Outcome, Signal
from resilient_train.ground.wording import describe, tags

pytestmark = pytest.mark.usefixtures("careless")


def strictly(text: str) -> Any:

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def full(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("run_started", step=0)
    journal.write("drill_fired", drill=3, name="nan_batch")
    journal.write("incident_opened", incident={"evidence": "häßlich, \n", "loss": math.nan})
    journal.close()
    return journal.path, journal.entries


# The journal.


def test_entries_are_lines_that_strict_readers_take(full: tuple[Path, list[dict[str, Any]]]) -> None:
    """Each line is an object with number, time, kind and checksum; a NaN is named."""
    path, _ = full
    first, _, third = (strictly(line) for line in path.read_text("ascii").splitlines())
    assert list(first) == ["n", "at", "kind", "format", "step", "crc"]
    assert (first["n"], first["kind"], first["step"]) == (1, "run_started", 0)
    assert abs(first["at"] / 1000 - time.time()) < 60
    assert third["incident"] == {"evidence": "häßlich, \n", "loss": "nan"}


def test_what_is_read_back_is_what_was_in_memory(full: tuple[Path, list[dict[str, Any]]]) -> None:
    """A journal opened again has the same entries, and goes on counting; one that is not there is empty."""
    path, entries = full
    again = Journal(path)
    assert again.entries == entries == read(path)
    again.write("more")
    assert read(path)[-1]["n"] == 4
    assert read(path) == again.entries
    path.unlink()
    assert Journal(path).entries == read(path) == []
    assert not path.exists(), "the first entry makes it"


def test_a_journal_that_cannot_be_read_is_refused_in_one_line(full: tuple[Path, list[dict[str, Any]]]) -> None:
    """Neither read nor written over, even if only its last process was of another version."""
    path, entries = full
    content = path.read_bytes() + _sealed(json.dumps({**entries[0], "n": 4, "format": 4}).encode()[:-1])
    path.write_bytes(content)
    with pytest.raises(
        TrainError, match=r"journal\.jsonl cannot be read: it is of format 4, where this version reads 3"
    ):
        Journal(path)
    with pytest.raises(OSError, match=r"^it is of format 4, where this version reads 3: resume"):
        read(path)
    assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    with pytest.raises(TrainError, match="cannot be read"):
        Journal(path)


def test_a_cut_at_any_byte_leaves_the_entries_before_it(full: tuple[Path, list[dict[str, Any]]]) -> None:
    """Opening gives the whole entries, the next one begins a new line, and what is written is read back."""
    path, entries = full
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = content[: length + 1].count(b"\n")  # all but its newline is a whole one
        assert read(path) == entries[:whole]
        assert path.read_bytes() == content[:length], "half an entry may become a whole one: only the writer cuts"
        journal = Journal(path)
        assert journal.entries == entries[:whole]
        journal.write("later", number=length)
        assert [entry["n"] for entry in read(path)] == [*range(1, whole + 2)]
        assert read(path) == journal.entries


def test_every_bit_is_guarded(full: tuple[Path, list[dict[str, Any]]]) -> None:
    """A flip in any byte loses its own entry, or two if it joins their lines, and no other; a writer goes on."""
    path, entries = full
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        left = read(path)
        assert [entry for entry in entries if entry in left] == left
        assert len(left) >= len(entries) - 1 - (content[at] == 10)
        assert left != entries
        if at % 7 == 0:
            journal = Journal(path)
            journal.write("later")
            assert read(path) == journal.entries == [*left, journal.entries[-1]]


def test_plain_is_what_any_reader_takes() -> None:
    """Text for what JSON has no word for, everything else as it is; numpy's numbers are numbers."""
    given = {"a": math.nan, 1: [math.inf, (True, None, 3)], "signal": Signal.HANG, "path": Path("a/b"), "set": {3}}
    given["numpy"] = [np.float32(0.5), np.int64(3), np.float64("nan")]
    taken = {"a": "nan", "1": ["inf", [True, None, 3]], "signal": "hang", "path": "a/b", "set": [3]}
    assert strictly(json.dumps(plain(given))) == plain(given) == taken | {"numpy": [0.5, 3, "nan"]}


def test_what_is_lost_in_the_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that never comes back: two entries, one warning, one error, no exception."""
    journal = Journal(tmp_path / "gone" / "journal.jsonl")
    journal.write("one")
    journal.write("two")
    assert [entry["kind"] for entry in journal.entries] == ["one", "two"]
    journal.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert "lacks the last 2 entries" in caplog.text


# Incidents as lines.

SPIKE = Incident(
    id=3,
    anomaly=Anomaly(
        Signal.LOSS_SPIKE, 1204, 1310, since=1190, evidence=free_text("loss 8.12 where 2.9 to 3.4 was usual")
    ),
    diagnosis=Diagnosis(Cause.EXPLOSION, free_text("Lower the learning rate.")),
    decision=Decision((Action("rewind"), Action("lower_lr", {"factor": 0.5, "rewarm": 20})), rung=1),
    rewound_to=1177,
    steps_lost=27,
    seconds=0.1234,
)
POISON = Incident(
    id=1,
    anomaly=Anomaly(Signal.NONFINITE_LOSS, 1204, 1204, since=1203, landed=False, ranks=(3, 1)),
    diagnosis=Diagnosis(
        Cause.OPERATION,
        free_text("Take the logarithm of something positive."),
        Culprit("backward", "log", "net.head", "mine.py", 31, ({"name": "x", "min": -math.inf, "shape": [2, 3]},)),
        rows=(17, 90_000),
    ),
    decision=Decision((Action("skip"),)),
    steps_lost=1,
)


def test_a_line_has_the_contracts_keys_first() -> None:
    """People's scripts rely on these names; what the engine needs beside them comes behind."""
    keys = "id step tick rank signal cause culprit rows advice actions rewound_to steps_lost seconds outcome evidence"
    assert list(in_words(SPIKE))[:15] == keys.split()
    line = strictly(json.dumps(in_words(SPIKE)))
    assert line["actions"] == [{"remedy": "rewind"}, {"remedy": "lower_lr", "factor": 0.5, "rewarm": 20}]
    assert (line["rank"], line["culprit"], line["rows"], line["outcome"]) == (None, None, [], None)
    line = strictly(json.dumps(in_words(replace(POISON, outcome=Outcome.RECOVERED))))
    assert (line["rank"], line["rows"], line["outcome"]) == (1, [17, 90_000], "recovered")
    assert line["culprit"]["inputs"] == [{"name": "x", "min": "-inf", "shape": [2, 3]}]
    assert list(line["culprit"]) == ["phase", "op", "module", "file", "line", "inputs"]


INCIDENTS = {
    "a spike": SPIKE,
    "a line": POISON,
    "the end": replace(
        POISON,
        diagnosis=replace(POISON.diagnosis, culprit=None, symptom=POISON.diagnosis.culprit),
        decision=Decision((Action("lower_lr", {"factor": math.inf}),), rung=3, gave_up=free_text("enough\n")),
        outcome=Outcome.GAVE_UP,
    ),
    "nothing known": Incident(2, Anomaly(Signal.HANG, 0, 0, 0), Diagnosis(Cause.PROCESS), Decision()),
}


@pytest.mark.parametrize("name", INCIDENTS)
def test_an_incident_comes_back_from_its_line(name: str) -> None:
    """A resumed process has every incident as it was, and every one of them can be told."""
    incident = INCIDENTS[name]
    tree = strictly(json.dumps(plain(asdict(incident))))
    finite = from_tree(tree)  # an infinity in the settings became its name
    assert plain(asdict(finite)) == tree
    assert replace(finite, decision=incident.decision, diagnosis=incident.diagnosis) == incident
    assert len(describe(incident).split("\n")) in (2, 3, 4)
    assert "\n" not in describe(incident, "outcome")
    assert describe(incident, "final", last_good=None)
    assert tags([incident], "well")


# The book of them.


def test_incidents_are_listed_once_their_outcome_is_known(tmp_path: Path) -> None:
    book = IncidentLog(tmp_path)
    file = tmp_path / "incidents.jsonl"
    assert file.read_text() == ""
    for incident in (POISON, SPIKE):
        book.add(incident)
        book.record_treatment(replace(incident, seconds=0.5))
        assert file.read_text() == ""
    book.close(replace(SPIKE, outcome=Outcome.RECOVERED))
    book.close(replace(POISON, outcome=Outcome.RECURRED))
    assert [strictly(line)["outcome"] for line in file.read_text().splitlines()] == ["recovered", "recurred"]
    kinds = [entry["kind"] for entry in read(tmp_path / "journal.jsonl")]
    assert kinds == ["incident_opened", "incident_treated"] * 2 + ["incident_closed"] * 2


def test_an_open_incident_survives(tmp_path: Path) -> None:
    """The process that resumes has all incidents as they were left; it closes what is open."""
    before = IncidentLog(tmp_path)
    treated = replace(SPIKE, seconds=0.5)
    closed = replace(from_tree(plain(asdict(POISON))), outcome=Outcome.RECOVERED)
    before.add(SPIKE)
    before.add(POISON)
    before.record_treatment(treated)
    before.close(closed)
    after = IncidentLog(tmp_path)
    assert after.incidents == [closed, treated]
    assert after.next_id == 4
    after.close(replace(treated, outcome=Outcome.RECOVERED))
    assert [json.loads(line)["id"] for line in (tmp_path / "incidents.jsonl").read_text().splitlines()] == [1, 3]


def test_the_list_is_made_anew_from_the_journal(tmp_path: Path) -> None:
    book = IncidentLog(tmp_path)
    book.add(POISON)
    book.close(replace(POISON, outcome=Outcome.RECOVERED))
    file = tmp_path / "incidents.jsonl"
    right = file.read_bytes()
    for damage in (b"", b'{"id": 1, "st', b"nonsense\n"):
        file.write_bytes(damage)
        IncidentLog(tmp_path)
        assert file.read_bytes() == right
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def _sealed(body: bytes) -> bytes:
    """Seal as the format says, independently of the code under test."""
    return body + b', "crc": "' + f"{zlib.crc32(body):08x}".encode() + b'"}\n'
