"""A disk whose power can be cut before any of its calls, and that knows what would be there afterwards.

What lasts is what POSIX promises and no more: the content of a file as it was when that file was last synced, and the
names in a directory as they were when that directory was last synced. A rename is one step: it was done or it was not.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_train.ground import files

FATES = ("kept", "dropped", "half", "torn 1")  # of what was not synced; any other word is torn otherwise


class PowerCut(BaseException):
    """From here on nothing reaches the disk, whatever is tried."""


@dataclass
class _File:
    now: bytearray
    synced: bytes


@dataclass
class _Directory:
    now: dict[str, _Node]
    synced: dict[str, _Node]
    since: list[Callable[[dict[str, _Node]], None]] = field(default_factory=list)  # what was done to the names


_Node = _File | _Directory


class Power(files.Disk):
    """The disk under `root`. Everything goes to the real one as well, until the call whose turn it is."""

    def __init__(self, root: Path, cut_before: int | None = None) -> None:
        """`cut_before`: the number of the call that is not made any more, from 1; None lets all of them pass."""
        self.root, self.cut_before = root, cut_before
        self.calls: list[tuple[str, str]] = []  # made: its name, and the file's
        self._top = _found(root)
        assert isinstance(self._top, _Directory)

    def create(self, path: Path) -> int:
        self._about_to("create", path)
        descriptor = super().create(path)
        self._appears(path).now[:] = b""
        return descriptor

    def open(self, path: Path) -> int:
        self._about_to("open", path)
        descriptor = super().open(path)
        self._appears(path)
        return descriptor

    def write(self, descriptor: int, data: memoryview, at: int) -> int:
        self._about_to("write", path := _path_of(descriptor))
        done = super().write(descriptor, data, at)
        content = self._file(path).now
        content.extend(bytes(max(0, at - len(content))))
        content[at : at + done] = data[:done]
        return done

    def sync(self, descriptor: int) -> None:
        self._about_to("sync", path := _path_of(descriptor))
        node = self._node(path)
        if isinstance(node, _File):
            node.synced = bytes(node.now)
        else:
            node.synced, node.since = dict(node.now), []

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent, "between two directories a rename is two steps on some disks"
        self._about_to("rename", old)
        super().rename(old, new)
        self._names(old.parent, lambda names: _moved(names, old.name, new.name))

    def unlink(self, path: Path) -> None:
        self._about_to("unlink", path)
        super().unlink(path)
        self._names(path.parent, lambda names: _gone(names, path.name))

    def make_directory(self, path: Path) -> None:
        self._about_to("make_directory", path)
        super().make_directory(path)
        made = _Directory({}, {})
        self._names(path.parent, lambda names: names.setdefault(path.name, made))

    def remove_directory(self, path: Path) -> None:
        self._about_to("remove_directory", path)
        super().remove_directory(path)
        self._names(path.parent, lambda names: _gone(names, path.name))

    def after(self, fate: str, where: Path) -> Path:
        """Rebuild in `where` what a machine finds that starts again, where unsynced things had this fate."""
        _rebuilt(self._top, where, fate, random.Random(f"{fate} {self.cut_before}"))
        return where

    def _about_to(self, call: str, path: Path) -> None:
        if self.cut_before is not None and len(self.calls) + 1 >= self.cut_before:
            raise PowerCut(f"before {call} of {path}")
        self.calls.append((call, path.name))

    def _node(self, path: Path) -> _Node:
        node: _Node = self._top
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, _Directory)
            node = node.now[name]
        return node

    def _file(self, path: Path) -> _File:
        node = self._node(path)
        assert isinstance(node, _File)
        return node

    def _appears(self, path: Path) -> _File:
        parent = self._node(path.parent)
        assert isinstance(parent, _Directory)
        if path.name not in parent.now:
            made = _File(bytearray(), b"")
            self._names(path.parent, lambda names: names.setdefault(path.name, made))
        return self._file(path)

    def _names(self, directory: Path, change: Callable[[dict[str, _Node]], Any]) -> None:
        node = self._node(directory)
        assert isinstance(node, _Directory)
        change(node.now)
        node.since.append(change)


class Careless(files.Disk):
    """A disk that nobody waits for, where no power is ever cut."""

    def sync(self, descriptor: int) -> None:
        """Let it be."""


def _path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _found(path: Path) -> _Node:
    """What is there already was synced long ago."""
    if path.is_dir():
        names = {one.name: _found(one) for one in path.iterdir()}
        return _Directory(names, dict(names))
    return _File(bytearray(path.read_bytes()), path.read_bytes())


def _moved(names: dict[str, _Node], old: str, new: str) -> None:
    if old in names:
        names[new] = names.pop(old)


def _gone(names: dict[str, _Node], name: str) -> None:
    names.pop(name, None)


def _rebuilt(node: _Node, where: Path, fate: str, dice: random.Random) -> None:
    if isinstance(node, _File):
        where.write_bytes(_content(node, fate, dice))
        return
    where.mkdir(parents=True)
    for name, one in _names_after(node, fate, dice).items():
        _rebuilt(one, where / name, fate, dice)


def _names_after(node: _Directory, fate: str, dice: random.Random) -> dict[str, _Node]:
    if fate == "kept":
        return node.now
    names = dict(node.synced)
    if fate == "half":
        done = node.since[: len(node.since) // 2]
    else:
        done = [change for change in node.since if fate != "dropped" and dice.random() < 0.5]
    for change in done:
        change(names)
    return names


def _alike(one: bytes, other: bytes) -> int:
    """How many bytes they begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(one), len(other)))


def _content(node: _File, fate: str, dice: random.Random) -> bytes:
    now, synced = bytes(node.now), node.synced
    if fate == "kept" or now == synced:
        return now
    if fate == "dropped":
        return synced
    same = _alike(now, synced)  # was not written again
    if fate == "half":
        return now[: (same + len(now)) // 2]
    at = dice.randrange(same, len(now) + 1)
    old = synced[:at].ljust(at, b"\0")
    return dice.choice([now[:at], now[:at] + synced[at:], now[:at] + bytes(len(now) - at), old + now[at:]])
