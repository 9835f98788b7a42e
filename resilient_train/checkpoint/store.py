"""The checkpoints of a run: written as a whole or not at all, verified before they are used, pruned, demoted.

checkpoints/step-00000400/manifest.json         what it is of, and the sha256 of the others
                         /weights.safetensors   weights and buffers by their own names, for any program;
                         /tensors.safetensors   all other tensors
                         /tree.json             all other values
                         /share-00000-of-00002.safetensors   where tensors are sharded: what each rank has of them
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from resilient_train import files
from resilient_train.checkpoint import manifest as manifests
from resilient_train.checkpoint.manifest import MANIFEST, VERIFIED, WEIGHTS, Damaged, Manifest
from resilient_train.checkpoint.safetensors_files import NAMES, SharedWrite, chunks, collect_shares, write_share
from resilient_train.checkpoint.tree_files import SerializedTree, load_tree
from resilient_train.files import Written

CHECKPOINTS = "checkpoints"  # its name in a run directory

_NAME = re.compile(r"step-(\d{8,18})(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint on disk, and what its manifest says; or why it says nothing."""

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
    def is_usable(self) -> bool:
        """Say whether a run may resume from it, as far as its manifest says."""
        return self.manifest is not None and self.manifest.kind != manifests.DEMOTED

    def is_verified(self, since: int) -> bool:
        """Say whether it holds a verified state from not after `since`, as far as its manifest says."""
        return self.manifest is not None and self.manifest.kind == manifests.VERIFIED and self.manifest.step <= since

    @property
    def manifest_step(self) -> int:
        return self.manifest.step if self.manifest is not None else 0


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds."""

    parts: dict[str, Any]  # of the run's state, as a snapshot has them
    memory: dict[str, Any]  # what does not rewind, and is gone with a process


class Store:
    """The directory of a run's checkpoints."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINTS

    def entries(self) -> list[Entry]:
        """List what is there, the latest first; files are not read, so damage shows only in manifests.

        One without a readable manifest comes before all that are of no later step by its name: reported, not missed.
        """
        found: list[Entry] = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.path.iterdir():
                if _NAME.fullmatch(path.name):
                    found.append(Entry.of(path))
        entries = sorted((one for one in found if one.manifest is not None), key=_age, reverse=True)
        for lost in sorted((one for one in found if one.manifest is None), key=_age):
            step = _age(lost)[1]
            places = (at for at, one in enumerate(entries) if one.manifest is None or one.manifest_step <= step)
            entries.insert(next(places, len(entries)), lost)
        return entries

    def usable(self) -> Iterator[Entry]:
        """The entries that a run may resume from, the latest first."""
        return (one for one in self.entries() if one.is_usable)

    def write(
        self,
        describe: Callable[[dict[str, Written]], Manifest],
        parts: Mapping[str, Any],
        exported: Mapping[str, torch.Tensor],
        memory: Mapping[str, Any],
        shared: SharedWrite | None = None,
    ) -> Entry:
        """Write a checkpoint and commit it. Its manifest is made by `describe`, of what is in its files.

        `exported` are the tensors for other programs: weights that are among them are not written twice. Of a
        checkpoint that is `shared` rank 0 calls this, and waits for the others, which call `write_share`.
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
            manifest = describe(written)
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
        """Write what a rank other than 0 holds of a checkpoint."""
        new = files.temporary(self.path / f"new-{shared.label}")
        write_share(new, shared, lambda: SerializedTree({"parts": dict(parts()), "memory": {}}).sharded)

    @staticmethod
    def load(
        entry: Entry, device: torch.device, weights: Mapping[str, torch.Tensor], *, is_verified: bool = False
    ) -> Saved:
        """Read a checkpoint whose files are what was written; `weights` are those of the model. Raises Damaged.

        `is_verified`: rank 0 has read it through and found it so.
        """
        manifest = manifests.verify(entry.path, is_read=not is_verified)
        try:
            tree = load_tree(entry.path, device)
            exported = load_file(entry.path / WEIGHTS) if WEIGHTS in manifest.files else {}
        except (ValueError, OSError, SafetensorError) as error:
            raise Damaged(f"cannot be loaded: {' '.join(str(error).split())[:200]}") from error
        match tree:
            case {"parts": dict(parts), "memory": dict(memory)} if len(tree) == 2 and isinstance(
                parts.get("weights"), dict
            ):
                if parts.get("clock") != manifest.step:
                    raise Damaged("holds the state of another step than it says")
                there = {name: exported[name] for name in weights if name in exported}
                return Saved({**parts, "weights": {**there, **parts["weights"]}}, memory)
        raise Damaged("holds no state of a run")

    def mark(self, entry: Entry, kind: str) -> Entry:
        """Change what a checkpoint is: verified now, or demoted."""
        assert entry.manifest is not None
        manifest = replace(entry.manifest, kind=kind)
        files.commit_text(entry.path / MANIFEST, manifest.text())
        return Entry(entry.path, manifest)

    def demote(self, since: int) -> list[Entry]:
        """Mark what is newer than the newest step to be trusted."""
        newer = [one for one in self.usable() if one.manifest is not None and one.manifest.step > since]
        return [self.mark(one, manifests.DEMOTED) for one in newer]

    def prune(self, keep: int, keep_every: int, reference: int | None = None) -> None:
        """Remove old ones; what is not verified goes once something newer is. What cannot be removed stays."""
        entries = self.entries()
        verified = [one for one in entries if one.manifest is not None and one.manifest.kind == VERIFIED]
        if not verified:
            return
        kept = {one.path for one in verified[:keep]}
        if reference is not None:  # the run is not back where it was there
            kept |= {one.path for one in [one for one in verified if one.manifest_step <= reference][:1]}
        kept |= {one.path for one in verified if keep_every and one.manifest and not one.manifest.step % keep_every}
        newer = entries[: entries.index(verified[0])]
        kept |= {one.path for one in newer if one.manifest is not None and one.manifest.kind == manifests.CANDIDATE}
        for one in entries:
            is_of_newer_version = one.damage.startswith(manifests.UNKNOWN_FORMAT)
            if one.path not in kept and not is_of_newer_version:
                with contextlib.suppress(OSError):
                    hidden = files.temporary(one.path)  # an interrupted removal leaves no half checkpoint
                    files.disk.rename(one.path, hidden)
                    files.remove(hidden)

    def sweep(self) -> None:
        """Remove what kills have left behind."""
        files.sweep(self.path.resolve())  # it may be a link to another disk
        for entry in self.entries():
            files.sweep(entry.path)

    def _make_new(self, shared: SharedWrite | None) -> Path:
        """Make the directory in which a checkpoint is written before it has a name: rank 0 does it for all."""
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
    """By tick, which never goes back; without a manifest, by the step in its name."""
    if entry.manifest is not None:
        return entry.manifest.tick, entry.manifest.step, entry.path.name
    match = _NAME.fullmatch(entry.path.name)
    step = int(match[1]) if match else 0
    return step, step, entry.path.name
