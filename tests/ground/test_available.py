"""The memory for snapshots: half of what is available, by the machine and by every cgroup that the run is in."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from test_state import Bench

from resilient_train.ground.files import left_by_cgroups
from resilient_train.loop.hooks import snapshots_in_words


@pytest.mark.parametrize(
    ("available", "expected"),
    [(4 * 2**30, r"^keeps 4 snapshots to rewind to, every"), (40 * 2**10, "cannot rewind.* 0.0 MiB allowed")],
)
def test_half_of_what_is_available_counts(available: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache takes nearly all free memory once a data set was read, and gives it back when it is asked for."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    bench = Bench()
    bench.state.model.register_buffer("large", bench.net.norm.weight.new_zeros(10_000))
    assert re.search(expected, snapshots_in_words(bench.ring, bench.state))


def group(place: Path, **files: object) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (place / name.replace("__", ".")).write_text(f"{content}\n")


def left(tmp_path: Path, cgroup: str) -> list[int]:
    (tmp_path / "cgroup").write_text(cgroup)
    return sorted(left_by_cgroups(tmp_path / "cgroup", tmp_path / "fs"))


def test_of_nested_cgroups_the_tightest_counts(tmp_path: Path) -> None:
    """Of version 2, where `max` is no limit and `high` slows a process down before it; files cached are given back."""
    root = tmp_path / "fs"
    stat = "anon 700\nactive_file 20\ninactive_file 80\nshmem 5"
    group(root, memory__stat=stat)  # the first has no limits
    group(root / "jobs", memory__max=5000, memory__high="max", memory__current=900, memory__stat=stat)
    group(root / "jobs/7", memory__max="max", memory__high=2000, memory__current=900, memory__stat=stat)
    group(root / "jobs/7/step", memory__max=4000, memory__current=300, memory__stat=stat)
    assert left(tmp_path, "0::/jobs/7/step\n") == [1200, 3800, 4200]
