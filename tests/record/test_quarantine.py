"""quarantine.json: rows that stay out of the data, known again by the data set they belong to."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from user_programs import Augmented, Fixed, RarelyRandom

from resilient_train.core.randomness import seed_host
from resilient_train.data.rows import fingerprint
from resilient_train.extensions.quarantine import QUARANTINE, RowsLeftOut
from resilient_train.ground.types import fact

DATA = {"dataset": "Images", "rows": 50, "digests": {"0": "aa", "24": None, "49": "cc"}}
RAISES, NAN = fact("text", text="it raises"), fact("text", text="values that are not finite in x")


class Taken:
    """Samples that take note of the rows that are taken out of them."""

    def __init__(self) -> None:
        self.rows, self.out = 50, list[int]()

    def quarantine(self, rows: Any) -> None:
        self.out += rows


def quarantine_of(directory: Path, data: Any = lambda: DATA) -> RowsLeftOut:
    run: Any = SimpleNamespace(samples=Taken(), incident_log=SimpleNamespace(directory=directory), effects=[])
    rows = RowsLeftOut()
    rows.build(run)
    rows._fingerprint = cache(data)
    return rows


def test_rows_are_listed_with_their_reasons_and_the_data_set(tmp_path: Path) -> None:
    """In their order; what is listed already stays as it is, and a resume has them from the journal."""
    listed = quarantine_of(tmp_path)
    for rows, why, step in (([17, 3], NAN, 120), ([3, 49], RAISES, 200)):
        listed.add(dict.fromkeys(rows, why), step, incident=5)
        listed.write()
    content = json.loads((tmp_path / QUARANTINE).read_text())
    nan = {"reason": "values that are not finite in x", "step": 120, "incident": 5}
    raises = {"row": 49, "reason": "it raises", "step": 200, "incident": 5}
    assert content == {"format": 1, "data": DATA, "rows": [{"row": 17, **nan}, {"row": 3, **nan}, raises]}
    assert [file.name for file in tmp_path.iterdir()] == [QUARANTINE]
    (tmp_path / QUARANTINE).write_text("[" * 100_000)
    resumed = quarantine_of(tmp_path)
    resumed._run.effects[0].restore(json.loads(json.dumps([*listed._run.effects[0].state(), [50, [], 1, 1]])))
    assert (resumed.rows, resumed._run.samples.out) == (listed.rows, [17, 3, 49])  # type: ignore[attr-defined]
    assert json.loads((tmp_path / QUARANTINE).read_text()) == content


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


class Thing:
    """Nothing that could be hashed: its text shows an address."""


def test_other_data_is_another_data_set() -> None:
    """A changed row, another type. Of objects without a lasting form, such as sets, only the class counts."""
    rows = [0, 1, 0.0, {"x": 0}, torch.tensor(0), np.asarray(0), "0", [Thing(), {"a", "b"}], [Thing(), Thing()]]
    digests = [fingerprint(Rows(lambda index, row=row: row))["digests"]["0"] for row in rows]
    assert None not in digests
    assert len(set(digests)) == len(rows)
    assert fingerprint(Rows(lambda index: [Thing(), {"c"}]))["digests"]["0"] == digests[-2]
