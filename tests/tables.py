"""Tables of cases, each of which has a name."""

from __future__ import annotations

from typing import Any

import pytest


def table(names: tuple[str, ...], rows: dict[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Run a test with each of the rows, under its name."""
    return pytest.mark.parametrize(names, list(rows.values()), ids=list(rows))
