"""The checkpoints of a run: written completely or not at all, verified before use, demoted, and removed.

checkpoints/step-00000400/manifest.json         which state it holds, and the sha256 of the other files
                         /weights.safetensors   weights and buffers by their own names, for any program;
                         /tensors.safetensors   all other tensors
                         /tree.json             all other values
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from resilient_train.durable.tree_files import NAMES, TENSORS, TREE, SerializedTree, chunks, load_tree
from resilient_train.ground import files
from resilient_train.ground.files import Written, read_plain
from resilient_train.ground.wording import log

CHECKPOINTS = "checkpoints"  # its name in a run directory
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
VERIFIED, CANDIDATE, DEMOTED = "verified", "candidate", "demoted"


_FORMAT = 4
_NAME = re.compile(r"step-(\d{8,18})(\.\d+)?")


class Damaged(ValueError):
    """A checkpoint is not what was written. The message is one line."""


class OtherFormat(Damaged):
    """Another version has written it, and can read it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    kind: str  # verified; candidate: not verified yet; demoted: an incident began before it
    step: int
    tick: int
    position: int
    world: int  # processes
    samples: int  # of an update, over all processes and micro-batches
    each: int  # samples of a process, as configured; samples / world, unless the number of processes changed
    made_by: str
    at: int  # milliseconds since 1970
    effects: dict[str, Any]  # of remedies: knobs, skipped samples, patched lines, rows in quarantine
    groups: list[Any]  # the configured settings of each optimizer's parameter groups
    files: dict[str, Written]

    def text(self) -> str:
        """Return the content of the file; its last key is a digest of all before it."""
        body: dict[str, Any] = {"format": _FORMAT, **asdict(self)}
        body["files"] = {name: {"bytes": one.size, "sha256": one.sha256} for name, one in self.files.items()}
        return json.dumps({**body, "sha256": files.digest_of(body)}, indent=1) + "\n"


def read(checkpoint: Path) -> Manifest:
    """Read only the manifest of a checkpoint. Raises Damaged."""
    if checkpoint.is_symlink():  # what it leads to would be written to
        raise Damaged("is a link, not a directory")
    with _cannot_be_read(MANIFEST):
        content = read_plain(checkpoint / MANIFEST)
    try:
        node = json.loads(content.decode("utf-8"))
        if (format := node.pop("format")) != _FORMAT:
            raise OtherFormat(f"is of format {format!s:.20}, where this version reads {_FORMAT}")
        del node["sha256"]
        node["files"] = {name: Written(one["bytes"], one["sha256"]) for name, one in node["files"].items()}
        if node["files"].keys() != {TENSORS, TREE, WEIGHTS}:
            listed = ", ".join(map(repr, sorted(node["files"])))[:100] or "nothing"
            raise Damaged(f"{MANIFEST} lists {listed}, not the files of a checkpoint")
        manifest = Manifest(**node)
        if manifest.text().encode() != content:  # of another digest, or the same values in another form
            raise Damaged(f"{MANIFEST} is not what was written")
    except Damaged:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not a manifest") from error
    return manifest


def verify(checkpoint: Path, *, with_digests: bool = True) -> Manifest:
    """Compare the files of a checkpoint with its manifest; without digests, only their sizes. Raises Damaged."""
    manifest = read(checkpoint)
    for name, written in manifest.files.items():
        with _cannot_be_read(name), open(checkpoint / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != written.size:
                raise Damaged(f"{name} is {size:,} bytes long, and {written.size:,} were written")
            if with_digests and hashlib.file_digest(file, "sha256").hexdigest() != written.sha256:
                raise Damaged(f"{name} is not what was written")
    return manifest


@contextlib.contextmanager
def _cannot_be_read(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint on disk: its manifest, or why that cannot be read. The other files may be damaged all the same."""

    path: Path
    manifest: Manifest | None
    damage: str = ""
    is_foreign: bool = False  # another version has written it

    @classmethod
    def of(cls, path: Path) -> Entry:
        try:
            return cls(path, read(path))
        except Damaged as why:
            return cls(path, None, str(why), isinstance(why, OtherFormat))

    @property
    def kind(self) -> str:
        return self.manifest.kind if self.manifest is not None else ""

    @property
    def step(self) -> int:
        return self.manifest.step if self.manifest is not None else 0

    @property
    def is_usable(self) -> bool:
        return self.kind in (VERIFIED, CANDIDATE)

    @property
    def age(self) -> tuple[int, int, str]:
        """The tick, which never goes back, then step and name; without a manifest, the step in its name for both."""
        if self.manifest is not None:
            return self.manifest.tick, self.manifest.step, self.path.name
        step = int(self.path.name.removeprefix("step-").partition(".")[0])
        return step, step, self.path.name


@dataclass(frozen=True, slots=True)
class Saved:
    parts: dict[str, Any]  # the state of the run, as a snapshot has it
    memory: dict[str, Any]  # what does not rewind, but has to survive the end of a process


class Store:
    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINTS
        self.doubtful: set[Path] = set()  # to be demoted, but the disk did not take that yet

    def entries(self) -> list[Entry]:
        """List all checkpoints, the latest first; only manifests are read. One without a readable manifest comes before
        all of the same or an earlier step, so that a resume reports it.
        """
        found: list[Entry] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += [self._entry(path) for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        found.sort(key=lambda one: one.age, reverse=True)
        entries = [one for one in found if one.manifest is not None]
        for damaged in reversed([one for one in found if one.manifest is None]):
            places = (at for at, one in enumerate(entries) if one.manifest is None or one.step <= damaged.age[1])
            entries.insert(next(places, len(entries)), damaged)
        return entries

    def _entry(self, path: Path) -> Entry:
        entry = Entry.of(path)
        if path not in self.doubtful or entry.manifest is None:
            return entry
        return replace(entry, manifest=replace(entry.manifest, kind=DEMOTED))

    def usable(self) -> list[Entry]:
        return [one for one in self.entries() if one.is_usable]

    def write(
        self,
        manifest: Manifest,
        parts: Mapping[str, Any],
        exported: Mapping[str, torch.Tensor],
        memory: Mapping[str, Any],
        examine: Callable[[Entry], None] = lambda written: None,
    ) -> Entry:
        """Write a checkpoint, read it back, and commit it unless it differs or `examine` raises Damaged. Weights among
        `exported`, the tensors for other programs, are not written twice.
        """
        usual = {name: one for name, one in exported.items() if one.dtype in NAMES}
        rest = {name: one for name, one in parts["weights"].items() if name not in usual}
        tree = SerializedTree({"parts": {**parts, "weights": rest}, "memory": dict(memory)})
        if not self.path.is_dir():
            files.disk.make_directory(self.path)
            files.sync_directory(self.path.parent)
        new = files.temporary(self.path / "new")
        if new.exists():
            files.remove(new)
        files.disk.make_directory(new)
        try:
            written = tree.write(new) | {WEIGHTS: files.write_file(new / WEIGHTS, chunks(usual))}
            manifest = replace(manifest, files=written)
            files.write_file(new / MANIFEST, [manifest.text().encode()])
            verify(new)
            examine(Entry(new, manifest))
            path, number = self.path / f"step-{manifest.step:08}", 2
            while path.exists():  # after a rewind a run comes to the same step again
                path, number = self.path / f"step-{manifest.step:08}.{number}", number + 1
            files.commit_directory(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                files.remove(new)
            raise
        return Entry(path, manifest)

    @staticmethod
    def load(
        entry: Entry, device: torch.device, weights: Mapping[str, torch.Tensor], *, with_digests: bool = True
    ) -> Saved:
        """Verify a checkpoint and read it; `weights` are those of the model. Raises Damaged."""
        manifest = verify(entry.path, with_digests=with_digests)
        try:
            tree = load_tree(entry.path, device)
            exported = load_file(entry.path / WEIGHTS)
        except (ValueError, OSError, SafetensorError) as error:
            raise Damaged(f"cannot be loaded: {' '.join(str(error).split())[:200]}") from error
        match tree:
            case {"parts": {"weights": dict(rest)} as parts, "memory": dict(memory)} if len(tree) == 2:
                if parts.get("clock") != manifest.step:
                    raise Damaged("holds the state of another step than its manifest says")
                there = {name: exported[name] for name in weights if name in exported}
                return Saved({**parts, "weights": {**there, **rest}}, memory)
        raise Damaged("does not hold the state of a run")

    @staticmethod
    def mark(entry: Entry, kind: str) -> None:
        assert entry.manifest is not None
        files.commit_text(entry.path / MANIFEST, replace(entry.manifest, kind=kind).text())

    def demote(self, since: int | None = None) -> None:
        """Mark checkpoints after `since`, the newest step to trust, and those that could not be marked before. Raises
        OSError after all of them if one could not be; to this store it is demoted all the same.
        """
        if since is not None:
            self.doubtful |= {one.path for one in self.usable() if one.step > since}
        trouble = None
        for path in sorted(self.doubtful, reverse=True):
            try:
                if (entry := Entry.of(path)).is_usable:  # else it was removed meanwhile
                    self.mark(entry, DEMOTED)
                    log.info("the checkpoint %s is demoted: it is removed once a later one is verified", path.name)
                self.doubtful.discard(path)
            except OSError as error:
                trouble = error
        if trouble is not None:
            raise trouble

    def prune(self, keep: int, keep_every: int, reference: int | None = None) -> None:
        """Remove old checkpoints, and others once a newer one is verified; keep the newest until step `reference`."""
        entries = self.entries()
        verified = [one for one in entries if one.kind == VERIFIED]
        if not verified:
            return
        kept = verified[:keep]
        kept += [one for one in verified if keep_every and not one.step % keep_every]
        if reference is not None:  # the loss is not back where it was there
            kept += [one for one in verified if one.step <= reference][:1]
        kept += [one for one in entries[: entries.index(verified[0])] if one.kind == CANDIDATE]
        for one in entries:
            if one not in kept and not one.is_foreign:
                with contextlib.suppress(OSError):  # it stays until the next time
                    hidden = files.temporary(one.path)  # an interrupted removal leaves no half checkpoint
                    files.disk.rename(one.path, hidden)
                    files.remove(hidden)

    def sweep(self) -> None:
        files.sweep(self.path.resolve())  # it may be a link to another disk
        for entry in self.entries():
            files.sweep(entry.path)
