"""What a trainer counts and lists: what was added in between is added to an earlier state of it."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest

from resilient_train.adapters.rows_of_loader import copied, with_added


@pytest.mark.parametrize(
    ("noted", "before", "after", "expected"),
    [
        (3, 5, 9, 7),
        ({"tokens": 3}, {"tokens": 5}, {"tokens": 9, "new": 2}, {"tokens": 7, "new": 2}),
        ([1.5], [1.5, 2.5], [1.5, 2.5, 3.5], [1.5, 3.5]),
        ({"a": [1.5]}, {"a": [1.5, 2.5]}, {"a": [1.5, 2.5], "b": [4.5]}, {"a": [1.5], "b": [4.5]}),
        (["x"], ["x", "y"], [], []),  # it was cleared
        (deque(["x"], 2), deque(["x", "y"], 2), deque(["z", "w"], 2), deque(["z", "w"], 2)),  # it was full
        (0.25, 0.3, 0.3, 0.25),
        (None, "y", "y", None),
        (None, None, "z", "z"),
        (True, True, False, False),
    ],
)
def test_what_was_added_is_added(noted: Any, before: Any, after: Any, expected: Any) -> None:
    kept = copied([noted, before, after])
    found = with_added(noted, before, after)
    assert found == expected or found == pytest.approx(expected)
    assert [noted, before, after] == kept, "its arguments change"


def test_a_copy_is_of_its_kind_and_of_its_own() -> None:
    noted = {"train": defaultdict(list, loss=[1.0]), "texts": deque(["a"], 3)}
    made = copied(noted)
    made["train"]["loss"].append(2.0)
    made["train"]["new"].append(3.0)
    made["texts"].append("b")
    assert noted == {"train": {"loss": [1.0]}, "texts": deque(["a"])}
    assert made["texts"].maxlen == 3
