"""Entries of an outbox as MLflow takes them: in batches, with names and lengths that it accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from resilient_train.record.journal import Entry
from resilient_train.record.outbox import METRICS, PARAMS

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, RunTag

MOST_METRICS, MOST_PARAMS, PARAM_LENGTH, TAG_LENGTH, NAME_LENGTH = 1000, 100, 6000, 8000, 250  # MLflow's own limits

T = TypeVar("T")
Batch: TypeAlias = "tuple[Sequence[Metric], Sequence[Param], Sequence[RunTag]]"  # what `log_batch` takes


def batches(entries: Iterable[Entry]) -> Iterator[Batch]:
    """Translate the metrics and parameters among entries; what is damaged in them is passed over."""
    from mlflow.entities import Metric, Param

    metrics: list[Metric] = []
    params: dict[str, str] = {}
    for entry in entries:
        values = entry.get("values")
        if not isinstance(values, Mapping):
            continue
        if entry["kind"] == METRICS and type(tick := entry.get("tick")) is int:
            at = time_ms if type(time_ms := entry.get("time_ms")) is int else entry["at"]
            metrics += [Metric(name(key), _number(value), at, tick) for key, value in values.items()]
        elif entry["kind"] == PARAMS:
            params |= {name(key): cut(value, PARAM_LENGTH) for key, value in values.items()}
    yield from ((some, (), ()) for some in _slices(metrics, MOST_METRICS))
    yield from (((), some, ()) for some in _slices([Param(*item) for item in params.items()], MOST_PARAMS))


def tag_batches(tags: Mapping[str, str]) -> Iterator[Batch]:
    """Translate what is said about a run."""
    from mlflow.entities import RunTag

    said = [RunTag(name(key), cut(value, TAG_LENGTH)) for key, value in tags.items()]
    yield from (((), (), some) for some in _slices(said, MOST_PARAMS))


@lru_cache(maxsize=4096)
def name(key: str) -> str:
    """Return the nearest name that MLflow accepts: it refuses a whole batch for one `acc@1` or `../x`."""
    parts = re.sub(r"[^\w.\- :/]", "_", str(key)).split("/")
    plain = "/".join(part for part in parts if part not in ("", ".", ".."))
    return plain.lstrip("./")[:NAME_LENGTH].rstrip("/") or "_"


def cut(value: Any, length: int) -> str:
    """Return the text of a value, with dots where it is too long."""
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def _slices(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    return (items[start : start + length] for start in range(0, len(items), length))


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan  # a curve of NaN is found sooner than one that is missing
