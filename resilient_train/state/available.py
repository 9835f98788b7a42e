"""How much memory this process may still take: what the machine has, and what the limits of its cgroups leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

# By version: limits, what is used, and what of that the kernel gives back when it is asked for memory.
_FILES = {
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    "cgroup2": (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
}


def available_memory() -> int:
    """Return the bytes that can be had without swapping; the page cache counts, as it is given back."""
    return min([int(psutil.virtual_memory().available), *left_by_cgroups()])


def left_by_cgroups(proc: Path = Path("/proc/self")) -> Iterator[int]:
    """What each cgroup that the process is in, and each one above it, leaves it; nothing where there are none.

    psutil reads the files of the machine, which in a container are those of its host.
    """
    try:
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    paths = {kind: path for _, controllers, path in own for kind in controllers.split(",")}  # of version 2: ""
    for mount in mounts:
        root, place, kind, options = mount[3], Path(mount[4]), mount[mount.index("-") + 1], mount[-1]
        name = "" if kind == "cgroup2" else "memory"
        if kind not in _FILES or name not in paths or name not in ("", *options.split(",")):
            continue
        path = PurePosixPath(paths[name])
        # Only what lies below the root of the mount can be seen: of a container its own cgroup, at the mount itself.
        group = place / (path.relative_to(root) if path.is_relative_to(root) else "")
        while group.is_relative_to(place):
            yield from _left(group, *_FILES[kind])
            group = group.parent


def _left(group: Path, limits: tuple[str, ...], usage: str, cached: tuple[str, ...]) -> Iterator[int]:
    with suppress(OSError, ValueError):
        used = int((group / usage).read_text())
        words: Mapping[str, str] = dict(
            line.split() for line in (group / "memory.stat").read_text().splitlines() if " " in line
        )
        used -= sum(int(words.get(name, 0)) for name in cached)
        for name in limits:
            with suppress(OSError, ValueError):  # one that is not there, or `max`, is none
                yield max(0, int((group / name).read_text()) - used)
