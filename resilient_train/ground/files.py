"""Reads and writes files so that a crash leaves either the old file or the new one."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

_TEMPORARY = ".resilient-tmp"
_at_disk: dict[int, float] = {}  # by thread: since when it waits for the disk, on the monotonic clock


@contextlib.contextmanager
def at_disk() -> Iterator[None]:
    """Tell the watchdog that this thread waits for the disk, which may be slow, and does not hang."""
    thread = threading.get_ident()
    outer = _at_disk.get(thread)
    _at_disk[thread] = outer or time.monotonic()
    try:
        yield
    finally:
        if outer is None:
            del _at_disk[thread]


def conf() -> Path:
    """Return the folder of the YAML files: inside an installed package, next to it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def at_disk_since(thread: int | None) -> float | None:
    return _at_disk.get(thread or 0)


class Disk:
    """All calls that change the disk. Tests replace them to simulate a power cut at each one."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    @at_disk()
    def write(self, descriptor: int, data: memoryview, at: int) -> int:
        return os.pwrite(descriptor, data, at)

    @at_disk()
    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    @at_disk()
    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)


disk = Disk()


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, sync it, and return its size and digest; its name is durable once its directory is synced."""
    digest, size = hashlib.sha256(), 0
    descriptor = disk.create(path)
    try:
        for chunk in chunks:
            digest.update(chunk)
            size += write_all(descriptor, chunk, size)
        disk.sync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_all(descriptor: int, data: bytes | memoryview, at: int) -> int:
    """Write all bytes: on a disk that is nearly full, the kernel may write fewer at a time."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += disk.write(descriptor, view[done:], at + done)
    return done


def commit(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replace a file durably: write next to it, sync, rename, sync the directory."""
    new = temporary(path)
    try:
        write_file(new, chunks)
        disk.rename(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(new)
        raise
    sync_directory(path.parent)


def commit_text(path: Path, text: str) -> None:
    commit(path, [text.encode("utf-8")])


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a directory with its contents. Links are not followed."""
    if stat.S_ISDIR(path.lstat().st_mode):
        for one in path.iterdir():
            remove(one)
        disk.remove_directory(path)
    else:
        disk.unlink(path)


def temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{_TEMPORARY}")


def is_left_over(name: str) -> bool:
    return name.startswith(".") and name.endswith(_TEMPORARY)


def sweep(directory: Path) -> None:
    """Remove temporary files that kills have left behind, as far as they can be removed."""
    with contextlib.suppress(OSError):
        for path in [one for one in directory.iterdir() if is_left_over(one.name)]:
            with contextlib.suppress(OSError):
                remove(path)


def siblings(path: Path) -> Iterator[Path]:
    """Yield a path, and the names that are tried after it where it is taken."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def digest_of(tree: Any) -> str:
    """Return a digest of plain data."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def load_yaml(path: Path) -> Any:
    """Read a YAML file. Raises OSError, ValueError, RecursionError or YAMLError."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; None if it is missing or damaged."""
    try:
        return load_yaml(path)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def available_memory() -> int:
    """Return the bytes that the process may still take; the page cache counts, as it is given back when asked for."""
    return min([int(psutil.virtual_memory().available), *left_by_cgroups()])


def left_by_cgroups(process: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the bytes that each cgroup (version 2) of the process, and each one above it, still allows.

    psutil reads the files of the machine, which in a container are those of its host. In a container without a
    namespace the path is the host's and does not exist: then the mount itself is the container's own cgroup.
    """
    with suppress(OSError):
        own = [line.removeprefix("0::/") for line in process.read_text().splitlines() if line.startswith("0::/")]
        for group in (mount / place for path in map(Path, own) for place in (path, *path.parents)):
            with suppress(OSError, ValueError):  # the kernel frees on demand what it has cached of files
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                cached = int(stat["active_file"]) + int(stat["inactive_file"])
                used = int((group / "memory.current").read_text()) - cached
                for name in ("memory.max", "memory.high"):
                    with suppress(OSError, ValueError):  # no such file, or `max`: no limit
                        yield max(0, int((group / name).read_text()) - used)
