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
from resilient_train.ground.types import fact

DATA = {"dataset": "Images", "rows": 50, "digests": {"0": "aa", "24": None, "49": "cc"}}
RAISES = fact("text", text="it raises")
WHY = Quarantined(fact("text", text="values that are not finite in x"), 120, 3)


def adopt(listed: Quarantine, rows: Mapping[int, Quarantined]) -> None:
    listed.add(rows)
    listed.write()


def test_rows_are_listed_with_their_reasons_and_the_data_set(tmp_path: Path) -> None:
    """In their order; what is listed already stays as it is."""
    listed = Quarantine(tmp_path, lambda: DATA)
    adopt(listed, dict.fromkeys([17, 3], WHY))
    adopt(listed, dict.fromkeys([3, 49], Quarantined(RAISES, 200, 5)))
    content = json.loads((tmp_path / QUARANTINE).read_text())
    nan = {"reason": "values that are not finite in x", "step": 120, "incident": 3}
    raises = {"row": 49, "reason": "it raises", "step": 200, "incident": 5}
    assert content == {"format": 1, "data": DATA, "rows": [{"row": 17, **nan}, {"row": 3, **nan}, raises]}
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


def test_a_full_disk_costs_the_list_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are in quarantine all the same; the list is written with the next change, and the failure told once."""
    one = Quarantine(tmp_path, lambda: DATA)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "resilient_train"):
        patched.setattr(quarantine, "commit_text", full)
        adopt(one, dict.fromkeys([3], WHY))
        adopt(one, {4: Quarantined(RAISES, 5, 6)})
    assert list(one.rows) == [3, 4]
    (line,) = caplog.messages
    assert "quarantine.json cannot be written (No space left on device): this is retried with the next row" in line
    adopt(one, {4: Quarantined(RAISES, 7, 8)})
    assert [row["row"] for row in json.loads((tmp_path / QUARANTINE).read_text())["rows"]] == [3, 4]


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
