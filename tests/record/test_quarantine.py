"""quarantine.json: rows that stay out of the data, known again by the data set they belong to."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from user_programs import Augmented, Fixed, RarelyRandom

from resilient_train.core.randomness import seed_host
from resilient_train.data.rows import fingerprint
from resilient_train.extensions import quarantine
from resilient_train.extensions.quarantine import QUARANTINE, Quarantine, Quarantined
from resilient_train.ground.errors import ConfigError
from resilient_train.ground.types import fact

DATA = {"dataset": "Images", "rows": 50, "digests": {"0": "aa", "24": None, "49": "cc"}}
RAISES = fact("text", text="it raises")
WHY = Quarantined(fact("text", text="values that are not finite in x"), 120, 3)


def same() -> dict[str, Any]:
    return DATA


def adopt(listed: Quarantine, rows: Mapping[int, Quarantined]) -> None:
    listed.add(rows)
    listed.write()


def listed(directory: Path, *rows: int) -> Path:
    adopt(Quarantine(directory, same), dict.fromkeys(rows, WHY))
    return directory / QUARANTINE


def test_what_is_listed_is_there_in_the_next_process(tmp_path: Path) -> None:
    """With its reasons, in its order; what is listed already stays as it is."""
    first = Quarantine(tmp_path, same)
    adopt(first, dict.fromkeys([17, 3], WHY))
    adopt(first, dict.fromkeys([3, 49], Quarantined(RAISES, 200, 5)))
    second = Quarantine(tmp_path, same)
    assert list(second.rows.items()) == [(17, WHY), (3, WHY), (49, Quarantined(RAISES, 200, 5))]
    other = Quarantine(None, same)  # of another rank, which writes nothing
    adopt(other, second.rows)
    for one in (second, other):
        adopt(one, {1: Quarantined(RAISES, 300, 6)})
    assert list(Quarantine(tmp_path, same).rows) == list(other.rows) == [17, 3, 49, 1]
    assert [file.name for file in tmp_path.iterdir()] == [QUARANTINE]


def test_a_healthy_run_has_no_list_and_fetches_no_row(tmp_path: Path) -> None:
    """The fingerprint is asked for with the first row, and once."""
    asked = itertools.count(1)

    def counted() -> dict[str, Any]:
        return {**DATA, "rows": 49 + next(asked)}

    one = Quarantine(tmp_path, counted)
    adopt(one, {})
    assert list(tmp_path.iterdir()) == []
    for row in range(3):
        adopt(one, {row: Quarantined(RAISES, 1, 1)})
    assert next(asked) == 2


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"dataset": "Texts"}, "lists rows of Images (50 rows), but this data set is Texts (50 rows)"),
        ({"rows": 1500}, "lists rows of Images (50 rows), but this data set is Images (1,500 rows)"),
        ({"digests": {"0": "aa", "49": "xx"}}, "lists rows of other data: row 49 of Images (50 rows) has changed"),
    ],
)
def test_the_list_of_another_data_set_is_refused(tmp_path: Path, here: dict[str, Any], said: str) -> None:
    """In one line with the file."""
    file = listed(tmp_path, 3)
    before = file.read_text()
    with pytest.raises(ConfigError) as refused:
        Quarantine(tmp_path, lambda: {**DATA, **here})
    assert said in str(refused.value)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert file.read_text() == before


@pytest.mark.parametrize("digests", [{"0": "aa", "24": "bb", "49": None}, {"0": None, "24": None}, {}])
def test_rows_that_cannot_be_compared_tell_nothing(tmp_path: Path, digests: dict[str, Any]) -> None:
    listed(tmp_path, 3)
    assert list(Quarantine(tmp_path, lambda: {**DATA, "digests": digests}).rows) == [3]


def damaged(change: Any) -> str:
    content = {"format": 1, "data": json.loads(json.dumps(DATA)), "rows": [{"row": 3, **vars_of(WHY)}]}
    change(content)
    return json.dumps(content)


def vars_of(why: Quarantined) -> dict[str, Any]:
    return {"reason": why.reason, "step": why.step, "incident": why.incident}


DAMAGE = [
    *("", "[" * 100_000, "null", '{"format": 1}'),
    damaged(lambda content: content["rows"].append(3)),
    *[damaged(lambda content, odd=odd: content["rows"][0].update(odd)) for odd in ({"row": True}, {"row": 50})],
]


@pytest.mark.parametrize("text", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_list_is_told_and_executes_nothing(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is put aside, because the run would rather go on."""
    file = tmp_path / QUARANTINE
    file.write_text(text)
    with caplog.at_level(logging.ERROR, "resilient_train"):
        own = Quarantine(tmp_path, same)
    assert dict(own.rows) == {}
    assert "cannot be used and is renamed: is damaged" in caplog.text
    assert (tmp_path / "quarantine.json.damaged").read_text() == text
    adopt(own, {5: Quarantined(RAISES, 1, 1)})
    assert list(Quarantine(tmp_path, same).rows) == [5]


def test_a_list_of_a_later_version_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / QUARANTINE).write_text(damaged(lambda content: content.update(format=2, rows={"3": "new"})))
    assert not Quarantine(tmp_path, same).rows
    assert "is renamed: is of format 2, where this version reads 1" in caplog.text


def test_a_full_disk_costs_the_list_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are in quarantine all the same; the list is written with the next change, and the failure told once."""
    one = Quarantine(tmp_path, same)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "resilient_train"):
        patched.setattr(quarantine, "commit_text", full)
        adopt(one, dict.fromkeys([3], WHY))
        adopt(one, {4: Quarantined(RAISES, 5, 6)})
    assert list(one.rows) == [3, 4]
    (line,) = caplog.messages
    assert "quarantine.json cannot be written (No space left on device): this is retried with the next row" in line
    adopt(one, {4: Quarantined(RAISES, 7, 8)})
    assert Quarantine(tmp_path, same).rows == one.rows


def full(path: Path, text: str) -> None:
    raise OSError(28, "No space left on device")


# The fingerprint.


class Rows:
    def __init__(self, row: Any, rows: int = 20) -> None:
        self.row, self.rows = row, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return self.row(index)


@pytest.mark.parametrize("kind", [Augmented, RarelyRandom, Fixed])
def test_a_data_set_is_known_again(kind: Any) -> None:
    """Whatever was drawn before, and nothing that is drawn afterwards changes; one row is looked at."""
    seed_host(1)
    drawn = [torch.rand(1).item(), random.random(), np.random.random()]
    seed_host(1)
    first = fingerprint(kind(9))
    assert [torch.rand(1).item(), random.random(), np.random.random()] == drawn
    assert fingerprint(kind(9)) == first
    assert (first["dataset"], first["rows"], list(first["digests"])) == (kind.__name__, 9, ["0"])
    assert first["digests"]["0"] is not None
    assert json.loads(json.dumps(first)) == first
    assert list(fingerprint(kind(9), [7, 5])["digests"]) == ["5"]


class Thing:
    """Nothing that could be hashed: its text shows an address."""


def test_other_data_is_another_data_set() -> None:
    """A changed row, another type. Of objects without a lasting form, such as sets, only the class counts."""
    rows = [0, 1, 0.0, {"x": 0}, torch.tensor(0), np.asarray(0), "0", [Thing(), {"a", "b"}], [Thing(), Thing()]]
    digests = [fingerprint(Rows(lambda index, row=row: row))["digests"]["0"] for row in rows]
    assert None not in digests
    assert len(set(digests)) == len(rows)
    assert fingerprint(Rows(lambda index: [Thing(), {"c"}]))["digests"]["0"] == digests[-2]


@pytest.mark.parametrize(
    "row",
    [
        lambda index: np.random.default_rng().random(),
        lambda index: (_ for _ in ()).throw(OSError("no")),
        lambda index: np.array([print, index], dtype=object).sum(),
    ],
)
def test_a_row_that_raises_or_never_repeats_has_no_digest(row: Any) -> None:
    assert fingerprint(Rows(row))["digests"] == {"0": None}
