"""quarantine.json: rows that stay out of the data, known again by the data set they belong to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from resilient_train.extensions.quarantine import QUARANTINE, RowsLeftOut
from resilient_train.ground.types import fact

DATA = {"dataset": "list", "rows": 50}
RAISES, NAN = fact("text", text="it raises"), fact("text", text="values that are not finite in x")


class Taken:
    """Samples that take note of the rows that are taken out of them."""

    def __init__(self) -> None:
        self.rows, self.out, self.dataset = 50, list[int](), [0] * 50

    def quarantine(self, rows: Any) -> None:
        self.out += rows


def quarantine_of(directory: Path) -> RowsLeftOut:
    run: Any = SimpleNamespace(samples=Taken(), incident_log=SimpleNamespace(directory=directory), effects=[])
    rows = RowsLeftOut()
    rows.build(run)
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
