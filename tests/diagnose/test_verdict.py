"""From facts to a cause, as a table; and the parts of a search that need no run."""

from __future__ import annotations

import math
from collections import UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_train.extensions.diagnosis import worst_weight
from resilient_train.extensions.diagnosis.rows import guilty, nonfinite_fields, outlying_fields
from resilient_train.extensions.diagnosis.verdict import (
    Observations,
    Origin,
    climbed,
    of_error,
    of_nonfinite,
    of_spike,
    on_operation,
)
from resilient_train.ground.sentences import SENTENCES, SINGULAR
from resilient_train.ground.types import Cause, Facts, fact
from resilient_train.ground.wording import say
from resilient_train.parts.code_lines import Line
from resilient_train.parts.run import lost_eps


def origin(op: str, *inputs: Mapping[str, Any], kind: str = "inf", **more: Any) -> Origin:
    return Origin(op, Line("/home/me/losses.py", 41, "net.head"), inputs=inputs, kind=kind, **more)


def values(low: float, high: float, smallest: float = 1e-3) -> dict[str, Any]:
    held = {"min": low, "max": high, "smallest": smallest}
    return {"shape": [8], "dtype": "float32", "nonfinite": 0, **held}


AGAIN = Observations(reproduced=True)
EVERYWHERE = Observations(reproduced=True, everywhere=True, is_compared=True)
ONLY_HERE = Observations(reproduced=True, is_compared=True)
ODD = {4: fact("text", text="[1] is 1e+30")}
UNIT, ZEROS, HUGE, LOGS = values(0, 1), values(0, 1, 0.0), values(-1e30, 1e30), values(-9, 0)


def broke(op: str, *inputs: Mapping[str, Any], kind: str = "inf", seen: Observations = AGAIN, **more: Any) -> Any:
    return replace(seen, origin=origin(op, *inputs, kind=kind), **more)


@pytest.mark.parametrize(
    ("seen", "climb", "cause", "said"),
    [
        (broke("log", ZEROS), 1, Cause.OPERATION, "infinite at 0"),
        (broke("pow", values(-3, 2), kind="nan"), 1, Cause.OPERATION, "negative base"),
        # The slope of a fractional power at 0, next to values above 1.
        (broke("pow", values(0, 50, 0.0)), 1, Cause.OPERATION, "steep, at 0"),
        (broke("pow", values(0, 1e25, 0.0)), 1, Cause.OVERFLOW, "wider type"),
        # The slope of 1 / (1 + exp(-x)): NaN, because exp overflows.
        (broke("exp", values(-310, 95), kind="nan"), 1, Cause.OVERFLOW, "wider type"),
        (broke("linalg_det", values(-9, 90)), 1, Cause.OVERFLOW, "wider type"),
        (broke("linalg_inv", UNIT), 1, Cause.OPERATION, "identity"),
        (broke("ctc_loss", LOGS, seen=EVERYWHERE), 1, Cause.OPERATION, "empty, too long"),
        (broke("mul", HUGE, seen=ONLY_HERE, rows=(4,)), 1e5, Cause.OVERFLOW, "row 4"),
        # An ordinary row that a singular operation meets.
        (broke("sqrt", ZEROS, rows=(7,)), 1, Cause.OPERATION, "Seen with row 7."),
    ],
)
def test_what_an_operation_met(seen: Observations, climb: float, cause: Cause, said: str) -> None:
    """A point where it has no value, or more than its type can hold."""
    found = of_nonfinite(replace(seen, climb=climb))
    assert (found.cause, found.rows) == (cause, ())
    assert said in say(found.advice)


ROW = replace(ONLY_HERE, rows=(4,))
RARE = broke("sqrt", ZEROS, seen=ROW, is_rare=True)
GIVEN, FAILED = origin("fill", kind="nan", was_given=True), origin("sqrt", kind="error")
NUMBER, PRODUCT = origin("mul", HUGE, is_scalar=True), origin("prod", HUGE, is_scalar=True)
RAISED = broke("Mine", UNIT, seen=ROW, kind="error", error="ValueError: no")
THROWN = broke("Normal", HUGE, seen=EVERYWHERE, kind="domain", landed=2)
# What is said, of what cause and whom it blames; and what matters to it: without that something else is said.
OF_NONFINITE: list[tuple[str, Any, str, dict[str, Any], str]] = [
    ("bad_rows", replace(ROW, odd=ODD), "data rows", {"rows": (4, 5)}, "rows_fail"),
    ("batch_not_finite", replace(AGAIN, batch_is_bad=True), "data", {"everywhere": True}, "reproducible"),
    (
        "is_given",
        replace(AGAIN, origin=GIVEN),
        "operation line",
        {"origin": origin("fill", kind="nan")},
        "makes_nonfinite",
    ),
    ("climbed", replace(AGAIN, climb=1e5), "explosion", {"is_compared": True}, "reproducible"),
    ("climbed", broke("mul", HUGE, climb=1e5), "explosion", {"climb": 9.0}, "overflows"),
    ("every_batch_breaks", broke("mul", HUGE, seen=EVERYWHERE, landed=9), "explosion", {"landed": 0}, "overflows"),
    ("ordinary_rows", replace(ROW, climb=1e5), "unknown suspects", {"climb": 9.0}, "rows_fail"),
    ("rows_fail", ROW, "unknown rows", {"rows": ()}, "reproducible"),
    ("rows_fail", replace(ROW, climb=1e5, is_beyond=True), "overflow rows", {"is_beyond": False}, "ordinary_rows"),
    ("reproducible", replace(AGAIN, failure=fact("text", text="it cannot")), "unknown", {"climb": 1e5}, "climbed"),
    ("overflows", broke("mul", HUGE), "overflow line patch", {"origin": origin("sqrt")}, "singular"),
    # A single number is patched only if it is a product of many. A loss that overflows has to stay visible.
    ("overflows", replace(AGAIN, origin=NUMBER), "overflow line", {"origin": None}, "reproducible"),
    ("overflows", replace(AGAIN, origin=PRODUCT), "overflow line patch", {"origin": None}, "reproducible"),
    ("bad_rows", RARE, "data line rows", {"is_rare": False}, "singular"),
    ("bad_rows", broke("ctc_loss", LOGS, seen=ROW), "data rows", {"everywhere": True}, "singular"),
    ("singular", broke("sqrt", seen=ROW), "operation line patch", {"origin": None}, "rows_fail"),
    ("singular", broke("sqrt", seen=ROW, is_tried=True), "operation line rows patch", {"origin": None}, "rows_fail"),
]
OF_ERROR: list[tuple[str, Any, str, dict[str, Any], str]] = [
    ("bad_rows", replace(ROW, odd=ODD), "data rows", {"odd": {}}, "rows_raised"),
    ("every_batch_breaks", THROWN, "explosion", {"landed": 5}, "raised"),
    ("singular", broke("sqrt", kind="nan"), "operation line patch", {"origin": FAILED}, "batches_raise"),
    ("raised", broke("cholesky", kind="error"), "operation line patch", {"origin": FAILED}, "batches_raise"),
    ("rows_raised", RAISED, "data rows", {"everywhere": True}, "batches_raise"),
    ("batches_raise", replace(EVERYWHERE, error="no"), "unknown", {"everywhere": False, "rows": (4,)}, "rows_raised"),
]
OF_SPIKE: list[tuple[str, Any, str, dict[str, Any], str]] = [
    ("bad_rows", replace(ROW, odd=ODD), "data rows", {"odd": {}}, "ordinary_rows"),
    ("ordinary_rows", ROW, "unknown suspects", {"everywhere": True}, "other_batches_too"),
    ("climbed", replace(EVERYWHERE, climb=1e3), "explosion", {"everywhere": False}, "this_batch_only"),
    ("climbed", replace(AGAIN, climb=1e3), "explosion", {"climb": 9.0, "leap": 1e9}, "not_compared"),
    ("climbed", replace(EVERYWHERE, leap=1e5), "explosion", {"leap": 1e3}, "other_batches_too"),
]
ROWS = [(of_nonfinite, OF_NONFINITE), (of_error, OF_ERROR), (of_spike, OF_SPIKE)]


@pytest.mark.parametrize(
    ("explain", "says", "seen", "blamed", "differs", "other"), [(of, *row) for of, rows in ROWS for row in rows]
)
def test_what_is_said(explain: Any, says: str, seen: Any, blamed: str, differs: dict[str, Any], other: str) -> None:
    """Each cause with whom it blames, and not where what matters to it differs."""
    found = explain(seen)
    assert found.advice[0]["fact"] == says
    assert explain(replace(seen, **differs)).advice[0]["fact"] == other
    has = {"line": found.culprit, "rows": found.rows, "suspects": found.suspects, "patch": found.patchable}
    assert " ".join([found.cause, *(one for one, value in has.items() if value)]) == blamed
    assert "{" not in say(found.advice)
    assert {one["fact"] for one in found.advice} <= SENTENCES.keys()


LOOP, LARGE = values(-5, 5, 0.0), values(-1e9, 1e9)


@pytest.mark.parametrize(
    ("seen", "leap", "landed", "cause"),
    [
        # A distribution refuses what the first updates have made of its parameters.
        (broke("Normal", HUGE, seen=EVERYWHERE, kind="domain"), 1, 2, Cause.EXPLOSION),
        (broke("Normal", HUGE, seen=EVERYWHERE, kind="domain"), 1, 0, Cause.OPERATION),  # it was built like that
        (broke("Normal", HUGE, seen=ONLY_HERE, kind="domain"), 1, 2, Cause.OPERATION),
        (broke("Normal", values(-1, 1), seen=EVERYWHERE, kind="domain"), 1, 2, Cause.OPERATION),  # a scale of -1
        (broke("Mine", HUGE, seen=EVERYWHERE, kind="error"), 1, 2, Cause.UNKNOWN),  # a bug of the program
        # What a recurrent call is given does not show how far its values have gone: that it breaks everywhere does.
        (broke("rnn_relu", LOOP, seen=EVERYWHERE, kind="nan"), 1, 9, Cause.EXPLOSION),  # inf - inf, within the call
        (broke("rnn_relu", LOOP, seen=EVERYWHERE, kind="nan"), 1, 0, Cause.OVERFLOW),  # no update has led there
        (broke("exp", values(0, 120), seen=EVERYWHERE), 1, 9, Cause.OVERFLOW),
        (broke("exp", values(0, 120), seen=EVERYWHERE), 1, 2, Cause.EXPLOSION),  # the first updates have led there
        (broke("exp", values(0, 120), seen=ONLY_HERE), 1, 2, Cause.OVERFLOW),
        # Where every batch breaks after the loss has leaped, the line is one of many that do.
        (broke("layer_norm", LARGE, seen=EVERYWHERE, kind="nan"), 1e6, 9, Cause.EXPLOSION),
        (broke("layer_norm", LARGE, seen=EVERYWHERE, kind="nan"), 1e3, 9, Cause.OPERATION),
        # Near a pole losses are large before one is infinite.
        (broke("div", LARGE, seen=EVERYWHERE, kind="nan"), 1e18, 9, Cause.OPERATION),
    ],
)
def test_a_line_is_not_blamed_where_the_weights_have_led_it_there(
    seen: Observations, leap: float, landed: int, cause: Cause
) -> None:
    """Only where every batch breaks, soon after the first updates or after the loss has leaped."""
    explain = of_error if seen.origin and seen.origin.kind in ("domain", "error") else of_nonfinite
    found = explain(replace(seen, leap=leap, landed=landed, error="ValueError: no"))
    assert (found.cause, found.culprit is None) == (cause, cause is Cause.EXPLOSION)


def test_climbing_is_measured_by_what_was_usual_before() -> None:
    assert climbed([1.0, 1e3, 1e6, 1e9]) == pytest.approx(1e6)
    assert climbed([2.0] * 30 + [2.2] * 8) == pytest.approx(1.1)
    assert [climbed(nothing) for nothing in ([], [0.0, 0.0, 5.0])] == [1.0, 1.0]


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 70), data=st.data())
def test_guilty_rows_are_found_one_by_one(count: int, data: st.DataObject) -> None:
    """Each row that breaks a batch alone is found, and no other; where most do, none is said to."""
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=max(1, count // 3)))
    assert guilty(count, lambda places: bool(bad & set(places))) == tuple(sorted(bad))
    assert guilty(count, lambda places: True) == ((0,) if count == 1 else ())
    assert guilty(count, lambda places: False) == ()


def test_rows_that_break_only_together_are_not_named() -> None:
    assert guilty(8, lambda places: {1, 6} <= set(places)) == ()


def said_of(facts: Facts) -> list[str]:
    return [say([one]) for one in facts]


Point = namedtuple("Point", ["x", "y"])


def test_what_is_odd_about_a_row() -> None:
    """Fields and places of values that are not finite; fields far beyond those of other rows."""
    row = {"image": torch.tensor([[0.0, math.nan], [math.inf, 1.0]]), "label": 3, "weight": math.nan}
    assert said_of(nonfinite_fields(row)) == ["['image'] at [0, 1] is NaN, and 1 more", "['weight'] is NaN"]
    nested = ([UserDict(a={"b": math.nan, 3: math.inf})], Point(math.nan, 1.0), {"x": [0.0, torch.tensor(-math.inf)]})
    places = ["[0][0]['a']['b'] is NaN", "[0][0]['a'][3] is inf", "[1].x is NaN", "[2]['x'][1] is -inf"]
    assert said_of(nonfinite_fields(nested)) == places
    assert said_of(nonfinite_fields(nested[1])) == [".x is NaN"]
    assert said_of(nonfinite_fields([0.0, math.nan])) == ["element 1 is NaN"]
    assert said_of(nonfinite_fields(math.nan)) == ["its value is NaN"]
    assert said_of(nonfinite_fields(torch.tensor([1.0, complex(math.inf, 1.0)]))) == ["its value at [1] is inf"]
    others = [(torch.randn(8), 1.0) for _ in range(50)]
    assert outlying_fields((torch.randn(8), 1.5), others, 4.0) == ()
    far = outlying_fields((torch.randn(8), -4e6), others, 1e4)
    assert said_of(far) == ["element 1 is -4e+06, where 50 other rows stay within ±1"]
    common = [(torch.randn(8), 0.0) for _ in range(50)]
    assert outlying_fields((torch.randn(8), 1.0), common, 4.0) == ()  # of a rare class, which is nothing odd
    assert len(outlying_fields((torch.randn(8), 1e6), common, 4.0)) == 1


CHANCES = [0.05 + n / 100 for n in range(64)]


@pytest.mark.parametrize(
    ("value", "others", "is_odd"),
    [
        # Far below all others of a field that is always positive: a chance or a deviation that a loss is divided by.
        (1e-6, CHANCES, True),
        (1e-6, [1e-6, *CHANCES[1:]], True),  # one of the others is as bad
        (1e-3, CHANCES, False),
        (1e-6, [n / 100 for n in range(64)], False),  # some are 0: it is no field that has to be positive
        (0.0005, [0.9, 0.8], False),  # two rows show nothing
    ],
)
def test_a_value_far_below_all_others_is_odd(value: float, others: list[float], is_odd: bool) -> None:
    found = say(outlying_fields({"at": value}, [{"at": one} for one in others], 1e3))
    assert bool(found) is is_odd
    assert not is_odd or found.startswith(f"['at'] is {value:.3g}, where nearly all of {len(others)} other rows")


def test_damage_names_the_element() -> None:
    before = {"a.weight": torch.ones(3, 4), "b.bias": torch.zeros(5)}
    weights = {name: weight.clone() for name, weight in before.items()}
    weights["a.weight"][1, 2] = 900.0
    assert worst_weight(weights, before) == (899, {"name": "a.weight", "at": [1, 2], "before": 1, "now": 900})
    weights["b.bias"][3] = math.nan
    assert worst_weight(weights, {})[1]["at"] == [3]


def test_an_epsilon_that_its_type_cannot_hold() -> None:
    """It is the optimizer's fault, not the hardware's."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    for dtype, eps, is_lost in ((half, 1e-8, 1), (half, 1e-3, 0), (brain, 1e-8, 0), (single, 0.0, 1), (single, 0, 1)):
        weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], eps=eps)
        assert (lost_eps([optimizer]) is not None) == is_lost


def test_every_singular_operation_has_advice() -> None:
    for op in SINGULAR:
        (found,) = on_operation(origin(op, ZEROS))
        assert (found["fact"], found["family"]) == ("singular", op)
        assert say([found]).startswith(f"`{op}` at losses.py:41 ")
