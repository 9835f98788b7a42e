"""What a person sees in a terminal: the story of a run, the end of a run, help, completion by TAB."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from command import MINE, command
from stories import free_text, incident

import resilient_train
from resilient_train import __main__
from resilient_train.command import incidents, status
from resilient_train.durable.incident_log import IncidentLog
from resilient_train.durable.journal import plain, seal
from resilient_train.durable.lock import DirectoryLock
from resilient_train.ground.types import Action, Cause, Culprit, Decision, Diagnosis, Incident

Said = pytest.CaptureFixture[str]


# ------------------------------------------------------------------------------------------------- incidents, as a page


def blamed(file: str, line: int) -> Diagnosis:
    return Diagnosis(
        Cause.OPERATION, free_text("Add an epsilon."), Culprit("backward", "sqrt", "net.0", file, line), rows=(77,)
    )


def write(run_dir: Path, *met: Incident, summary: dict[str, object] | None = None) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text("run: {steps: 300}\n")
    book = IncidentLog(run_dir)
    book.note("began", processes=1, samples=32)
    for one in met:
        book.add(replace(one, outcome=None))
        book.record_treatment(replace(one, outcome=None))
        if one.outcome is not None:
            book.close(one)
    book.close_files()
    if summary is not None:
        whole = {"status": "completed", "exit_code": 0, "steps": 300, "ticks": 330, "seconds": 42.0, **summary}
        (run_dir / "summary.json").write_text(json.dumps(whole))
    return run_dir


@pytest.fixture
def met(tmp_path: Path) -> Path:
    return write(tmp_path / "run", incident(1), incident(2, diagnosis=blamed("/x/mine.py", 2)), summary={})


def test_programs_get_the_lines_of_incidents_jsonl(met: Path, capsys: Said) -> None:
    """One for each, and nothing else."""
    assert incidents.main([str(met), "--json"]) == 0
    assert capsys.readouterr().out == (met / "incidents.jsonl").read_text()


def test_a_damaged_journal_is_told_as_far_as_it_is_whole(met: Path, capsys: Said) -> None:
    """A damaged line is left out; a journal that is none ends both verbs with one line and 1."""
    journal = met / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], b"\x00\xff\n", *lines[1:], b'{"n": 99}\n', b'{"half']))
    assert incidents.main([str(met)]) == 0
    said = capsys.readouterr().out
    assert said.count("outcome: recovered") == 2
    journal.unlink()
    journal.mkdir()
    for verb in (incidents, status):
        assert verb.main([str(met)]) == 1
        assert re.fullmatch(r"\S+journal.jsonl cannot be read: .+\n", capsys.readouterr().err)


def test_nothing_in_a_journal_is_obeyed(tmp_path: Path, capsys: Said) -> None:
    """Not by the terminal, not by the library that colours: control characters, markup."""
    bad = "\x1b]0;owned\x07\x1b[2J\r\n[bold red]x[/] \u202e \ud800"
    culprit = Culprit("forward", bad, bad, bad, 3)
    one = incident(
        1,
        diagnosis=Diagnosis(Cause.OPERATION, free_text(bad), culprit),
        decision=Decision((Action(bad, {bad: bad}),)),
    )
    run_dir = write(tmp_path / "run", summary={"status": "failed", "exit_code": 1, "why": bad})
    one = replace(one, anomaly=replace(one.anomaly, evidence=free_text(bad)))
    kinds = [("incident_opened", plain(asdict(one))), ("incident_opened", [bad])]
    entries = [{"n": n, "at": 0, "kind": kind, "incident": line} for n, (kind, line) in enumerate(kinds, 1)]
    (run_dir / "journal.jsonl").write_bytes(b"".join(seal(json.dumps(entry)) for entry in entries))
    assert incidents.main([str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", said)
    assert "[bold red]x[/]" in said


class Following:
    def __init__(self, run_dir: Path, capsys: Said) -> None:
        self.said, self.ended, self._capsys = "", [], capsys  # type: tuple[str, list[int], Said]
        self._thread = threading.Thread(target=lambda: self.ended.append(incidents.main([str(run_dir), "--follow"])))
        self._thread.start()

    def until(self, *words: str) -> None:
        deadline = time.monotonic() + 60
        while not all(word in self.said for word in words):
            assert time.monotonic() < deadline, self.said
            self.said += self._capsys.readouterr().out
            time.sleep(0.05)

    def end(self) -> int:
        self._thread.join(60)
        self.said += self._capsys.readouterr().out
        (code,) = self.ended
        return code


def test_following_shows_each_incident_once_and_ends_with_the_run(tmp_path: Path, capsys: Said) -> None:
    """What was done, in a line what became of it; then the verdict, and the run's exit code."""
    run_dir = write(tmp_path / "run")
    lock, book = DirectoryLock(run_dir), IncidentLog(run_dir)
    one = incident(3, None)
    following = Following(run_dir, capsys)
    following.until("All is well so far", "no incidents", f"Running, process {os.getpid()} on ")
    book.add(one)
    book.record_treatment(one)
    following.until("rewound to step 125", "outcome: open\n")
    book.close(incident(3))
    following.until("\nincident 3: recovered\n")
    (run_dir / "summary.json").write_text('{"status": "preempted", "exit_code": 75, "steps": 120, "ticks": 130}')
    lock.release()
    assert following.end() == 75
    assert "\nStopped on request: at step 120 of 300; 1 incident" in following.said
    assert following.said.count("loss 8.12 where 2.9 to 3.4 was usual") == 1
    assert following.said.count("incident 3") == 2
    assert incidents.main([str(run_dir), "--follow", "--json"]) == 75, "at once, where it has ended already"
    assert len(capsys.readouterr().out.splitlines()) == 1


# ----------------------------------------------------------------------------------------------------- the end of a run


def after(text: str, start: str) -> list[str]:
    lines = text.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith(start)]
    return lines[place:]


def test_a_run_ends_with_what_a_person_wants_to_know(here: Path, run_command: command, capsys: Said) -> None:
    """Clean, with incidents, given up, and resumed: the verdict, advice, where it all lies, what to do next.

    `status` has the same reason, and the run's own exit code.
    """
    often = [*MINE, "checkpoint.disk.every=10", "checkpoint.memory.every=5", "checkpoint.verify_after=2"]
    clean = run_command([*often, "run.steps=20", "run.name=run"])
    assert clean.code == 0, clean.stderr
    verdict, *rest = after(clean.stdout, "completed 20 steps; ")[1:]
    assert re.fullmatch(r"All is well: 20 steps; no incidents\. Recent loss [\d.]+\.", verdict)
    assert rest == [
        f"weights: {here}/runs/run/weights.safetensors",
        f"newest checkpoint: {here}/runs/run/checkpoints/step-00000020 (step 20)",
    ]
    drilled = run_command([*often, "run.steps=40", "run.name=run", "drill=bit_flip", "drill.at=[30]"])
    assert drilled.code == 0, drilled.stderr
    told = after(drilled.stdout, "completed 40 steps; ")
    assert re.match(
        r"Recovered: 40 steps; 1 incident \(1 corruption\)\. "
        r"\d+ of \d+ updates refused or undone\. Recent loss ",
        told[1],
    )
    assert told[-1].startswith("for the full report: ")
    assert told[-1].endswith(f" -m resilient_train incidents {here}/runs/run")
    assert set(told) <= {
        line.split(" ", 3)[3] for line in Path("runs/run/train.log").read_text().splitlines() if " INFO " in line
    }
    gave_up = run_command([*often, "run.steps=20", "run.name=other", "drill=nan_grad", "recovery=off"])
    assert gave_up.code == 3
    told = after(gave_up.stdout, "Gave up, needs attention: ")
    assert re.search(r": at step 0 of 20: a gradient is not finite at step \d+; ", told[0])
    assert status.main(["runs/other"]) == 3
    assert capsys.readouterr().out.startswith("runs/other: Gave up, needs attention")


# ----------------------------------------------------------------------------------------------------- help, completion


def test_help_is_that_of_hydra_and_names_the_verbs_and_the_version_is_ours(
    run_command: command, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    """With every group and key, for the options that are chosen."""
    monkeypatch.setattr(sys, "argv", ["resilient_train", "--version"])
    __main__.main()
    assert capsys.readouterr().out == f"resilient_train {resilient_train.__version__}\n"
    shown = run_command(["--help", "model=mlp"]).stdout
    for words in ("resilient-train incidents|", "model: custom, gpt,", "  steps: 1000\n", "  hidden:\n"):
        assert words in shown


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--help model=gtp", "model=gtp: no such option; there are custom, gpt,"),
        ("--nonsense 10", "error: unrecognized arguments: --nonsense"),
        ("--config-dir", "error: argument --config-dir/-cd: expected one argument"),
        ("incident runs/demo", "error: incident: neither a verb nor key=value;"),
    ],
)
def test_a_word_that_is_no_option_is_answered_in_the_last_line(typed: str, hint: str, run_command: command) -> None:
    """For one with dashes, the options with dashes that there are come first."""
    outcome = run_command(typed.split())
    assert (outcome.code, outcome.stdout) == (2, "")
    assert hint in outcome.stderr.splitlines()[-1]
