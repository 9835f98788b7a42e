"""The checkpoints of a run: written completely or not at all, verified before use, demoted, and removed.

checkpoints/step-00000400/manifest.json         which state it holds, and the sha256 of the other files
                         /weights.safetensors   weights and buffers by their own names, for any program;
                         /tensors.safetensors   all other tensors
                         /tree.json             all other values
                         /share-00000-of-00002.safetensors   of sharded tensors, the part of each rank
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from resilient_train import files
from resilient_train.checkpoint import manifest as manifests
from resilient_train.checkpoint.manifest import CANDIDATE, DEMOTED, MANIFEST, VERIFIED, WEIGHTS, Damaged, Manifest
from resilient_train.checkpoint.safetensors_files import NAMES, SharedWrite, chunks, collect_shares, write_share
from resilient_train.checkpoint.tree_files import SerializedTree, load_tree

CHECKPOINTS = "checkpoints"  # its name in a run directory

_NAME = re.compile(r"step-(\d{8,18})(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint on disk: its manifest, or why that cannot be read. The other files may be damaged all the same."""

    path: Path
    manifest: Manifest | None
    damage: str = ""

    @classmethod
    def of(cls, path: Path) -> Entry:
        try:
            return cls(path, manifests.read(path))
        except Damaged as why:
            return cls(path, None, str(why))

    @property
    def kind(self) -> str:
        """As in its manifest; empty without one."""
        return self.manifest.kind if self.manifest is not None else ""

    @property
    def step(self) -> int:
        """As in its manifest; 0 without one."""
        return self.manifest.step if self.manifest is not None else 0

    @property
    def is_usable(self) -> bool:
        """Say whether a run may resume from it."""
        return self.kind in (VERIFIED, CANDIDATE)


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of a checkpoint."""

    parts: dict[str, Any]  # the state of the run, as a snapshot has it
    memory: dict[str, Any]  # what does not rewind, but has to survive the end of a process


class Store:
    """The directory of a run's checkpoints."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINTS

    def entries(self) -> list[Entry]:
        """List all checkpoints, the latest first; only manifests are read.

        One without a readable manifest comes before all of the same or an earlier step, so that a resume reports it.
        """
        found: list[Entry] = []
        with contextlib.suppress(FileNotFoundError):
            found += [Entry.of(path) for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        entries = sorted((one for one in found if one.manifest is not None), key=_age, reverse=True)
        for damaged in sorted((one for one in found if one.manifest is None), key=_age):
            step = _age(damaged)[1]
            places = (at for at, one in enumerate(entries) if one.manifest is None or one.step <= step)
            entries.insert(next(places, len(entries)), damaged)
        return entries

    def usable(self) -> list[Entry]:
        """The checkpoints that the run may resume from, the latest first."""
        return [one for one in self.entries() if one.is_usable]

    def write(
        self,
        manifest: Manifest,
        parts: Mapping[str, Any],
        exported: Mapping[str, torch.Tensor],
        memory: Mapping[str, Any],
        shared: SharedWrite | None = None,
    ) -> Entry:
        """Write a checkpoint and commit it; its files are added to the manifest.

        `exported` are the tensors for other programs: weights that are among them are not written twice. Of a
        `shared` checkpoint rank 0 calls this, and waits for the other ranks, which call `write_share`.
        """
        usual = {name: one for name, one in exported.items() if one.dtype in NAMES}
        rest = {name: one for name, one in parts["weights"].items() if name not in usual}
        tree = SerializedTree({"parts": {**parts, "weights": rest}, "memory": dict(memory)})
        new = self._make_new(shared)
        try:
            written = tree.write(new)
            if shared is None:
                written[WEIGHTS] = files.write_file(new / WEIGHTS, chunks(usual))
            else:
                began = time.monotonic()
                write_share(new, shared, lambda: tree.sharded)
                written |= collect_shares(new, shared, time.monotonic() - began)
            manifest = replace(manifest, files=written)
            files.write_file(new / MANIFEST, [manifest.text().encode()])
            path, number = self.path / f"step-{manifest.step:08}", 2
            while path.exists():  # after a rewind a run comes to the same step again
                path, number = self.path / f"step-{manifest.step:08}.{number}", number + 1
            files.commit_directory(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                files.remove(new)
            raise
        return Entry(path, manifest)

    def write_share(self, parts: Callable[[], Mapping[str, Any]], shared: SharedWrite) -> None:
        """Write the share of a rank other than 0."""
        new = files.temporary(self.path / f"new-{shared.label}")
        write_share(new, shared, lambda: SerializedTree({"parts": dict(parts()), "memory": {}}).sharded)

    @staticmethod
    def load(
        entry: Entry, device: torch.device, weights: Mapping[str, torch.Tensor], *, with_digests: bool = True
    ) -> Saved:
        """Verify a checkpoint and read it; `weights` are those of the model. Raises Damaged."""
        manifest = manifests.verify(entry.path, with_digests=with_digests)
        try:
            tree = load_tree(entry.path, device)
            exported = load_file(entry.path / WEIGHTS) if WEIGHTS in manifest.files else {}
        except (ValueError, OSError, SafetensorError) as error:
            raise Damaged(f"cannot be loaded: {' '.join(str(error).split())[:200]}") from error
        match tree:
            case {"parts": {"weights": dict(rest)} as parts, "memory": dict(memory)} if len(tree) == 2:
                if parts.get("clock") != manifest.step:
                    raise Damaged("holds the state of another step than its manifest says")
                there = {name: exported[name] for name in weights if name in exported}
                return Saved({**parts, "weights": {**there, **rest}}, memory)
        raise Damaged("does not hold the state of a run")

    def mark(self, entry: Entry, kind: str) -> Entry:
        """Change the kind of a checkpoint, to verified or demoted."""
        assert entry.manifest is not None
        manifest = replace(entry.manifest, kind=kind)
        files.commit_text(entry.path / MANIFEST, manifest.text())
        return Entry(entry.path, manifest)

    def demote(self, since: int) -> list[Entry]:
        """Mark every checkpoint after `since`, the newest step that can be trusted."""
        return [self.mark(one, DEMOTED) for one in self.usable() if one.step > since]

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
            if one not in kept and not one.damage.startswith(manifests.UNKNOWN_FORMAT):
                with contextlib.suppress(OSError):  # it stays until the next time
                    hidden = files.temporary(one.path)  # an interrupted removal leaves no half checkpoint
                    files.disk.rename(one.path, hidden)
                    files.remove(hidden)

    def sweep(self) -> None:
        """Remove the temporary files of processes that were killed."""
        files.sweep(self.path.resolve())  # it may be a link to another disk
        for entry in self.entries():
            files.sweep(entry.path)

    def _make_new(self, shared: SharedWrite | None) -> Path:
        """Make the directory in which a checkpoint is written before it gets its name."""
        if not self.path.is_dir():
            files.disk.make_directory(self.path)
            files.sync_directory(self.path.parent)
        new = files.temporary(self.path / ("new" if shared is None else f"new-{shared.label}"))
        if shared is not None:
            files.sweep(self.path.resolve())  # another rank may have left files of a checkpoint that failed
        elif new.exists():
            files.remove(new)
        files.disk.make_directory(new)
        return new


def _age(entry: Entry) -> tuple[int, int, str]:
    """The tick, which never goes back, then step and name; without a manifest, the step in its name for both."""
    if entry.manifest is not None:
        return entry.manifest.tick, entry.manifest.step, entry.path.name
    step = int(entry.path.name.removeprefix("step-").partition(".")[0])
    return step, step, entry.path.name
