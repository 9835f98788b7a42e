"""What a setting may be, said in one line where it is something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from resilient_train.errors import ConfigError


def require_whole(key: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(key, value, f"must be a whole number, at least {at_least}")


def require_list_of_whole(key: str, value: Any, *, at_least: int) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(key, value, f"must be a list of whole numbers, such as [{at_least + 1}]")
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int) or one < at_least:
            raise ConfigError(key, list(value), f"{one} is not a whole number that is at least {at_least}")


def require_share(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(key, value, "must be a number from 0 to 1")


def require_factor(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(key, value, "must be a number above 0")


def require_claim(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "must be true or false")


def require_one_of(key: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(key, value, f"is not one of {', '.join(allowed)}")
