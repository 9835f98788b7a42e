"""The power is cut before every call that reaches the disk: what is found then is the old state or the new, whole."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from forged_checkpoints import newest, write
from power import FATES, Careless, Power, PowerCut

from resilient_train.durable.endings import Summary
from resilient_train.durable.journal import Journal, commit_json, read
from resilient_train.durable.manifest import CANDIDATE, DEMOTED
from resilient_train.durable.store import Store
from resilient_train.ground import files
from resilient_train.ground.files import commit_text, is_left_over


def cuts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: Callable[[Path], Any],
    act: Callable[[Path], Any],
    look: Callable[[Path], Any],
    fates: Sequence[str] = FATES,
) -> tuple[list[Any], list[Any], int]:
    """Cut the power before each call of `act`, and once after the last, with every fate, and `look` at what is left.

    Returns what was seen where `act` was cut short, what was seen where it had returned, and how many calls it made.
    """
    monkeypatch.setattr(files, "disk", Careless())
    (start := tmp_path / "start").mkdir()
    before(start)
    act(shutil.copytree(start, tmp_path / "whole"))
    monkeypatch.setattr(files, "disk", disk := Power(shutil.copytree(start, tmp_path / "counted")))
    act(disk.root)
    count = len(disk.calls)
    short: list[Any] = []
    full: list[Any] = []
    for number in range(1, count + 2):
        monkeypatch.setattr(files, "disk", disk := Power(shutil.copytree(start, tmp_path / f"cut {number}"), number))
        try:
            act(disk.root)
        except PowerCut:
            seen = short
        else:
            assert number == count + 1, "a cut has gone by unnoticed"
            seen = full
        monkeypatch.setattr(files, "disk", Careless())
        for fate in fates:
            after = disk.after(fate, tmp_path / f"cut {number} {fate}")
            try:
                seen.append(look(after))
            except Exception as error:
                raise AssertionError(f"{fate}, cut before call {number} of {disk.calls}: {error}") from error
            shutil.rmtree(after)
    return short, full, count


# What is found.


def found(run_dir: Path) -> int | None:
    """The step that the next start goes on from; it tidies up first, and can save at once."""
    store = Store(run_dir)
    store.sweep()
    step = newest(store)
    assert not [path for path in run_dir.rglob("*") if is_left_over(path.name)]
    write(store, 99)
    store.prune(1, 0)
    assert newest(store) == 99
    assert len(store.entries()) == 1
    return step


def entries(run_dir: Path) -> str:
    """The kinds in the journal; it can be written to at once."""
    journal = Journal(run_dir / "journal.jsonl")
    kinds = [entry["kind"] for entry in journal.entries]
    journal.write("later")
    assert not journal.waiting
    assert [entry["kind"] for entry in read(journal.path)] == [*kinds, "later"]
    return " ".join(kinds)


# What is done.


def nothing(run_dir: Path) -> None: ...


def two_checkpoints(run_dir: Path) -> None:
    write(Store(run_dir), 1)
    write(Store(run_dir), 2)


def save_and_prune(run_dir: Path) -> None:
    write(Store(run_dir), 2)
    Store(run_dir).prune(1, 0)


def summary(status: str) -> Summary:
    return Summary(status, 0, 9, 9, 0, 0.5, None, {"total": 0, "recovered": 0, "by_cause": {}}, 1, 2, None, None, None)


def append(count: int) -> Callable[[Path], Any]:
    def act(run_dir: Path) -> None:
        journal = Journal(run_dir / "journal.jsonl")
        for number in range(count):
            journal.write(str(number), filling="x" * 100)

    return act


def append_to_torn(run_dir: Path) -> None:
    append(2)(run_dir)
    with open(run_dir / "journal.jsonl", "ab") as file:
        file.write(b'{"n": 3, "at": 17672')


def littered(run_dir: Path) -> None:
    two_checkpoints(run_dir)
    shutil.copytree(run_dir / "checkpoints" / "step-00000002", run_dir / "checkpoints" / ".new.resilient-tmp")


Act = Callable[[Path], Any]

# What is there, what is done, and who looks; what is seen where it was cut short, and where it had returned.
CASES: dict[str, tuple[Act, Act, Act, set[str], str]] = {
    "the first checkpoint of all": (nothing, lambda run_dir: write(Store(run_dir), 1), found, {"None", "1"}, "1"),
    "a checkpoint beside another": (lambda run_dir: write(Store(run_dir), 1), save_and_prune, found, {"1", "2"}, "2"),
    "the same step once more": (
        lambda run_dir: write(Store(run_dir), 2, kind=CANDIDATE, tick=2),
        lambda run_dir: write(Store(run_dir), 2, tick=3),
        *(found, {"2"}, "2"),
    ),
    "pruning several": (
        lambda run_dir: [write(Store(run_dir), step) for step in (1, 2, 3)],
        lambda run_dir: Store(run_dir).prune(1, 0),
        *(found, {"3"}, "3"),
    ),
    "a sweep": (littered, lambda run_dir: Store(run_dir).sweep(), found, {"2"}, "2"),
    "a demotion": (two_checkpoints, lambda run_dir: Store(run_dir).demote(1), found, {"1", "2"}, "1"),
    "the first entry of a journal": (nothing, append(1), entries, {"", "0"}, "0"),
    "an entry of a journal": (append(2), append(2), entries, {"0 1", "0 1 0", "0 1 0 1"}, "0 1 0 1"),
    "an entry behind a torn one": (append_to_torn, append(1), entries, {"0 1", "0 1 0"}, "0 1 0"),
    "a summary": (
        lambda run_dir: commit_json(run_dir / "summary.json", asdict(summary("failed"))),
        lambda run_dir: commit_json(run_dir / "summary.json", asdict(summary("completed"))),
        lambda run_dir: json.loads((run_dir / "summary.json").read_text())["status"],
        *({"failed", "completed"}, "completed"),
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_the_old_state_or_the_new_one_is_found_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Cut before any call, whatever becomes of what was not synced; once it has returned it is the new one."""
    before, act, look, allowed, new = CASES[what]
    short, full, count = cuts(monkeypatch, tmp_path, before, act, look)
    assert count >= 2
    assert {str(one) for one in short} == allowed
    assert {str(one) for one in full} == {new}


def test_a_demoted_checkpoint_never_comes_back_by_halves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Demoting several goes from the newest down: an older one that is not to be trusted is not left as the newest."""

    def four(run_dir: Path) -> None:
        for step in (1, 2, 3, 4):
            write(Store(run_dir), step)

    def look(run_dir: Path) -> tuple[int, ...]:
        return tuple(entry.step for entry in Store(run_dir).entries() if entry.is_usable)

    short, full, _ = cuts(monkeypatch, tmp_path, four, lambda run_dir: Store(run_dir).demote(1), look)
    assert set(short) <= {(4, 3, 2, 1), (3, 2, 1), (2, 1), (1,)}
    assert set(full) == {(1,)}
    assert DEMOTED in {entry.kind for entry in Store(tmp_path / "whole").entries()}


@pytest.mark.parametrize("number", range(1, 40, 2))
def test_an_error_in_place_of_any_call_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    """A disk that refuses one call of a save, and works again: a checkpoint is there, and nothing half done."""
    write(Store(tmp_path), 1)

    class Refusing(Power):
        def _about_to(self, call: str, path: Path) -> None:
            super()._about_to(call, path)
            if len(self.calls) == number:
                raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "disk", Refusing(tmp_path))
    is_saved = True
    try:
        save_and_prune(tmp_path)
    except OSError:
        is_saved = False
    monkeypatch.setattr(files, "disk", Careless())
    assert found(tmp_path) in ((2,) if is_saved else (1, 2))


def test_the_simulated_disk_drops_what_was_not_synced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rename without a sync of the file before it loses both: the simulation catches what it is there to catch."""

    def careless(run_dir: Path) -> None:
        beside = run_dir / "beside"
        descriptor = files.disk.create(beside)
        files.disk.write(descriptor, memoryview(b"new"), 0)
        os.close(descriptor)
        files.disk.rename(beside, run_dir / "file")
        files.sync_directory(run_dir)

    seen, full, _ = cuts(
        *(monkeypatch, tmp_path),
        lambda run_dir: commit_text(run_dir / "file", "old"),
        careless,
        lambda run_dir: (run_dir / "file").read_text(),
    )
    assert Counter(full)["new"] < len(full)
    assert "" in {*seen, *full}
