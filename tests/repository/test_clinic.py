"""How the clinic judges, where a mistake would be published, and a few of its programs: the guard cures them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clinic.program import SMOKE
from clinic.runs import carried_out, statement
from clinic.score import HALF, RIGHT, TWIN, UNKNOWN, WRONG, Expected, Figures, Run, Said, by_case, summary

FILE = "/cases/one.py"
LINE = Expected("operation", ["sqrt"], [], FILE, [40, 41])
ROWS = Expected("data", [], [3, 7], FILE, [])


def said(cause: str = "operation", line: int | None = None, op: str = "sqrt", rows: Any = (), file: str = FILE) -> Said:
    return Said("nonfinite_grad", cause, file if line else None, line, op if line else None, rows, "", [], None)


def run(expected: Expected, *incidents: Said, **more: Any) -> Run:
    return Run("first", "one", 0, "ours", "digest", expected=expected, incidents=list(incidents), **more)


@pytest.mark.parametrize(
    ("expected", "incidents", "culprit", "accuses_another"),
    [
        (LINE, [], UNKNOWN, False),
        (LINE, [said()], UNKNOWN, False),
        (LINE, [said(line=41)], RIGHT, False),
        (LINE, [said(line=41, op="div")], HALF, False),
        (LINE, [said(line=42)], WRONG, True),
        (LINE, [said(line=41, file="/cases/program.py")], WRONG, True),
        (LINE, [said(line=42), said(line=40)], RIGHT, True),
        (ROWS, [said("overflow", line=5)], None, True),
        (ROWS, [said("data", line=5)], None, False),  # where bad rows were met is no accusation
    ],
)
def test_a_culprit_is_right_by_file_line_and_operation(
    expected: Expected, incidents: list[Said], culprit: str | None, accuses_another: bool
) -> None:
    """One incident that is right is enough; one that accuses an innocent line is told nevertheless."""
    judged = run(expected, *incidents)
    assert judged.accuses_another == accuses_another
    assert culprit in (None, judged.culprit)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [([], UNKNOWN), ([[3], [7]], RIGHT), ([[3]], HALF), ([[3, 7, 9]], HALF), ([[3, 9]], WRONG), ([[9]], WRONG)],
)
def test_rows_are_right_if_all_incidents_together_name_them_and_no_others(rows: list[Any], verdict: str) -> None:
    """Some of them, or all and others, are half right."""
    assert run(ROWS, *[said("data", rows=some) for some in rows]).rows == verdict
    assert run(ROWS, said("operation", rows=[3, 7])).rows == UNKNOWN, "on which an operation broke"


@pytest.mark.parametrize(
    ("more", "cured"),
    [
        ({"loss": 1.9, "is_finite": True}, True),  # a tenth of the way from 10 to 1 is 1.9
        ({"loss": 1.91, "is_finite": True}, False),
        ({"loss": 0.5, "is_finite": True}, True),
        ({"loss": 1.0, "is_finite": False}, False),
        ({"loss": None, "is_finite": True}, False),
        ({"loss": 1.0, "is_finite": True, "why": "gave up"}, False),
    ],
)
def test_cured_is_an_ordinary_end_with_finite_weights_near_the_mended_twin(more: dict[str, Any], cured: bool) -> None:
    """All three."""
    twin = Run("first", "one", 0, TWIN, "digest", loss=1.0, start=10.0)
    judged = run(LINE, said(line=41), lost=4, **more)
    figures = Figures.of([judged, twin])
    assert figures.is_cured(judged) is cured
    assert f"| `one` | {int(cured)}/1 | 1/1 |  |  |" in by_case(figures)
    assert f"| cured | {100 * cured} % ({int(cured)}/1) |" in summary(figures)


SOURCE = """\
def forward(x):
    for row in range(
        len(x)
    ):
        y = (
            x.sqrt()
        )
    return y
"""


@pytest.mark.parametrize(("marked", "lines"), [(6, [5, 6, 7]), (3, [2, 3, 4]), (8, [8])])
def test_a_guilty_line_stands_for_its_whole_statement(marked: int, lines: list[int]) -> None:
    """Python gives a call over several lines the number of any of them; of a loop it is the head, not the body."""
    assert list(statement(SOURCE, marked)) == lines


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("program", SMOKE)
def test_a_program_is_cured_and_what_broke_it_is_named(program: str) -> None:
    """The cause, and the line or the rows where some are to blame; no other line is blamed."""
    of, case = program.split(".")
    guarded, twin = (carried_out(Run(of, case, 0, arm, "digest")) for arm in ("ours", TWIN))
    expected = guarded.expected
    assert Figures.of([guarded, twin]).is_cured(guarded), guarded
    assert expected is not None
    assert (guarded.cause, guarded.accuses_another) == (RIGHT, False)
    assert guarded.culprit == (RIGHT if expected.ops else UNKNOWN)
    assert guarded.rows == (RIGHT if expected.rows else UNKNOWN)
