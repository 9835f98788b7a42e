"""What is noted is in the file in its order, whatever the disk and the end of the process do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from resilient_train.durable.journal import OUTBOX, Outbox, entries
from resilient_train.ground import files


def read(path: Path, start: int = 0) -> list[tuple[str, object]]:
    return [(one["kind"], one.get("tick")) for one, _ in entries(path, start) if one is not None]


def test_a_reader_goes_on_where_it_was_and_takes_no_half_line(tmp_path: Path) -> None:
    path, box = tmp_path / OUTBOX, Outbox(tmp_path / OUTBOX)
    box.put("metrics", tick=1)
    [(_, end)] = entries(path)
    whole = path.read_bytes()
    for cut in range(1, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        assert read(path, end) == []
    path.write_bytes(whole + whole)
    assert read(path, end) == [("metrics", 1)]
    assert read(path, 10**9) == [("metrics", 1), ("metrics", 1)]  # another file than the one that was read before


class Full(files.Disk):
    """A disk that takes nothing until there is room."""

    has_room = False

    def write(self, descriptor: int, data: memoryview, at: int) -> int:
        if not self.has_room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data, at)


def test_a_full_disk_is_waited_for_in_memory_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, box = Full(), Outbox(tmp_path / OUTBOX)
    monkeypatch.setattr(files, "disk", disk)
    for tick in range(5):
        disk.has_room = tick == 4
        box.put("metrics", tick=tick)
        assert len(read(tmp_path / OUTBOX)) == (5 if disk.has_room else 0)
    assert read(tmp_path / OUTBOX) == [("metrics", tick) for tick in range(5)]
    assert len(caplog.messages) == 1
